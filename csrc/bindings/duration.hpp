// Seconds, as Python gives them, as durations.
#pragma once

#include <optional>
#include <string>

#include "holmes/core/error.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

using TimeoutSeconds = std::optional<double>;

// Throws UsageError naming `what` where the value is not above 0, or longer than a Duration can be.
inline Duration to_duration(const char* what, double seconds) {
  constexpr double max_seconds = 1e9;
  if (!(seconds > 0) || seconds > max_seconds)
    throw UsageError(std::string(what) + " is " + std::to_string(seconds) +
                     "; it must be more than 0 and at most 1e9 seconds");
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace holmes
