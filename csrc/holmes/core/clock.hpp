// Clock and Duration: the monotonic clock of every wait and deadline.
#pragma once

#include <chrono>
#include <initializer_list>
#include <optional>

namespace holmes {

using Clock = std::chrono::steady_clock;
using Duration = std::chrono::nanoseconds;

// Absent ones are never.
inline std::optional<Clock::time_point> earliest(std::initializer_list<std::optional<Clock::time_point>> times) {
  std::optional<Clock::time_point> first;
  for (const auto& time : times)
    if (time && (!first || *time < *first)) first = time;
  return first;
}

}  // namespace holmes
