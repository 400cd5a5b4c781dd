#include "holmes/engine/spin_policy.hpp"

#include <sched.h>

#include <algorithm>
#include <ctime>

namespace holmes {
namespace {

// After this many waits that outlived the spin, spin only in one wait of `spin_retry`.
constexpr unsigned miss_limit = 4;
constexpr unsigned spin_retry = 16;
constexpr unsigned bulk_spin_retry = 64;  // of waits for much
// What a peer that runs on another processor has on its way is there within 1 to 2 us; leaving the processor takes a
// third of one (measured: calls of 2 ranks take a fifth less time without). Where ranks share processors, the peer can
// only run when this one leaves its own.
constexpr unsigned most_rushes = 32;
constexpr unsigned rush_retry = 64;

// What this thread has used of a processor. Waiting is bounded in it: where ranks share processors, a thread that
// yields lets the others run and burns little; where it has a processor to itself, it burns what it waits.
Duration thread_cpu_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// The first part is measured on the wall clock, which costs no system call.
bool SpinPolicy::Spin::goes_on() {
  if (is_rushing()) {
    ++rushed_;
    pause_processor();
    return true;
  }
  if (spin_ == Duration::zero()) return false;
  const auto now = Clock::now();
  if (!start_) start_ = now;
  if (now - *start_ >= spin_) {
    const Duration used = thread_cpu_time();
    if (!end_) end_ = used + spin_;
    if (used >= *end_) return false;
  }
  ::sched_yield();
  return true;
}

SpinPolicy::Spin SpinPolicy::begin(bool may_rush) {
  const bool rushes = may_rush && (rush_misses_ < miss_limit || ++no_rushes_ % rush_retry == 0);
  return {spin_, rushes ? most_rushes : 0};
}

void SpinPolicy::succeeded(const Spin& spin) {
  misses_ = 0;
  if (!spin.rushes()) return;
  if (spin.outlived_rush())
    rush_misses_ = std::min(rush_misses_ + 1, 2 * miss_limit);
  else if (rush_misses_ > 0)
    --rush_misses_;
}

bool SpinPolicy::allows(unsigned wait) const { return misses_ < miss_limit || wait % spin_retry == 0; }

bool SpinPolicy::allows_bulk() { return bulk_misses_ < miss_limit || ++bulk_waits_ % bulk_spin_retry == 0; }

bool SpinPolicy::waited_for_bulk(Duration duration, bool slept) {
  const bool is_long = slept && duration > spin_;
  if (is_long)
    bulk_misses_ = std::min(bulk_misses_ + 1, 2 * miss_limit);
  else if (bulk_misses_ > 0)
    --bulk_misses_;
  return is_long;
}

}  // namespace holmes
