// Clock and Duration: the monotonic clock of every wait and deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <optional>

#include "holmes/core/counted_clock.hpp"

namespace holmes {

// std::chrono::steady_clock, but for what a look costs where it is a slow system call (see CountedClock).
struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr bool is_steady = true;
  static time_point now() noexcept { return is_counted ? counted_now() : std::chrono::steady_clock::now(); }

private:
  static inline const bool is_counted = has_steady_counter() && is_look_slow();
};
using Duration = std::chrono::nanoseconds;

// The same clock for many looks within a microsecond, each of which takes half the time: they are at the processor's
// counter, where it has a steady one, and every 100 us at the clock, from which it is some nanoseconds off by then. One
// thread at a time.
class QuickClock {
public:
  Clock::time_point now() noexcept {
#if defined(__x86_64__)
    if (has_counter_) {
      const auto look = [] { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); };
      return Clock::time_point(std::chrono::nanoseconds(counted_.now([] { return __builtin_ia32_rdtsc(); }, look)));
    }
#endif
    return Clock::now();
  }

private:
  static constexpr std::int64_t believed_ns = 100'000;
  static inline const bool has_counter_ = has_steady_counter();
  CountedClock counted_{believed_ns};
};

// What the driver has just seen on the clock, for what ends in its next round and took no time: a look is a system call
// where the kernel has no vDSO. One thread at a time.
class RoundClock {
public:
  void set(Clock::time_point now) { seen_ = now; }
  void forget() { seen_.reset(); }
  // Of something that moved so many bytes since.
  Clock::time_point now(std::size_t bytes) const {
    constexpr std::size_t most_bytes = 8 * 1024;
    return seen_ && bytes <= most_bytes ? *seen_ : Clock::now();
  }

private:
  std::optional<Clock::time_point> seen_;
};

// Absent ones are never.
inline std::optional<Clock::time_point> earliest(std::initializer_list<std::optional<Clock::time_point>> times) {
  std::optional<Clock::time_point> first;
  for (const auto& time : times)
    if (time && (!first || *time < *first)) first = time;
  return first;
}

}  // namespace holmes
