// CountedClock: the system's monotonic clock, read from the processor's counter between two looks at it. For kernels
// where each look is a system call that another process carries out (user-mode Linux): 15 us there, and a round of
// short messages took eight looks. And for operations of a quarter of a microsecond (QuickClock).
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace holmes {

// One thread at a time. What the counter says is believed for a while after a look, so whatever becomes of the
// counter (a suspended machine, another processor), the time is wrong by a part of that; it never goes back.
class CountedClock {
public:
  // Longer than a round of short messages between two such kernels, which takes one.
  static constexpr std::int64_t default_believed_ns = 5'000'000;

  // Believes the counter for so long after a look.
  explicit CountedClock(std::int64_t believed_ns = default_believed_ns) : believed_ns_(believed_ns) {}
  // `count()`: the counter; `look()`: nanoseconds of the system's clock.
  template <typename Count, typename Look>
  std::int64_t now(const Count& count, const Look& look) {
    const std::uint64_t begin = count();
    if (begin - seen_count_ < believed_counts_)
      return last_ = std::max(
                 last_, seen_ + static_cast<std::int64_t>(ns_per_count_ * static_cast<double>(begin - seen_count_)));
    const std::int64_t time = look();
    take(begin, count() - begin, time);
    return last_ = std::max(last_, time);
  }

private:
  static constexpr std::int64_t least_ns = 10'000'000;  // apart are two looks that tell the counter's rate
  static constexpr std::uint64_t precision = 100;       // the rate is right to one of so many

  // The clock said `time` while the counter went `width` on from `begin`.
  void take(std::uint64_t begin, std::uint64_t width, std::int64_t time) {
    const std::uint64_t counts = begin - first_count_;
    const std::int64_t elapsed = time - first_;
    believed_counts_ = 0;
    seen_count_ = begin + width / 2;
    seen_ = time;
    if (has_first_ && elapsed < least_ns) return;
    if (has_first_ && width > counts / precision) return;  // this thread did not run meanwhile
    const double rate = static_cast<double>(elapsed) / static_cast<double>(counts);
    const bool is_known = ns_per_count_ > 0;
    const bool is_right =
        !is_known || (rate < ns_per_count_ * (1 + 1.0 / precision) && rate > ns_per_count_ * (1 - 1.0 / precision));
    if (!has_first_ || !is_right) {
      has_first_ = true;
      first_count_ = seen_count_;
      first_ = time;
      ns_per_count_ = 0;
      return;
    }
    ns_per_count_ = rate;
    believed_counts_ = static_cast<std::uint64_t>(static_cast<double>(believed_ns_) / rate);
  }

  std::int64_t believed_ns_;
  bool has_first_ = false;
  std::uint64_t first_count_ = 0;
  std::int64_t first_ = 0;
  double ns_per_count_ = 0;  // 0: not known
  std::uint64_t seen_count_ = 0;
  std::int64_t seen_ = 0;
  std::uint64_t believed_counts_ = 0;
  std::int64_t last_ = 0;
};

// Whether the processor has a counter of one rate, which programs may read.
inline bool has_steady_counter() noexcept {
#if defined(__x86_64__)
  constexpr unsigned leaf = 0x80000007;
  constexpr unsigned is_invariant = 1U << 8;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(leaf, &a, &b, &c, &d) != 0 && (d & is_invariant) != 0;
#else
  return false;
#endif
}

// Whether a look takes several microseconds: neither a vDSO's (30 ns) nor a system call (below 1 us) nor what reads a
// device (1 to 3 us, where the system does not trust the counter).
inline bool is_look_slow() noexcept {
#if defined(__x86_64__)
  constexpr std::uint64_t slow_counts = 12'000;
  std::uint64_t least = UINT64_MAX;
  for (int i = 0; i < 4; ++i) {
    const std::uint64_t begin = __builtin_ia32_rdtsc();
    static_cast<void>(std::chrono::steady_clock::now());
    least = std::min<std::uint64_t>(least, __builtin_ia32_rdtsc() - begin);
  }
  return least > slow_counts;
#else
  return false;
#endif
}

inline std::chrono::steady_clock::time_point counted_now() noexcept {
  using System = std::chrono::steady_clock;
#if defined(__x86_64__)
  thread_local CountedClock clock;
  const auto look = [] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(System::now().time_since_epoch()).count();
  };
  return System::time_point(std::chrono::duration_cast<System::duration>(
      std::chrono::nanoseconds(clock.now([] { return __builtin_ia32_rdtsc(); }, look))));
#else
  return System::now();
#endif
}

}  // namespace holmes
