#include "holmes/engine/spin_policy.hpp"

#include <algorithm>
#include <ctime>

namespace holmes {
namespace {

// After this many waits that outlived the spin, spin only in one wait of `spin_retry`.
constexpr unsigned miss_limit = 4;
constexpr unsigned spin_retry = 16;
constexpr unsigned bulk_spin_retry = 64;  // of waits for much

// What this thread has used of a processor. Waiting is bounded in it: where ranks share processors, a thread that
// yields lets the others run and burns little; where it has a processor to itself, it burns what it waits.
Duration thread_cpu_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

// The first part is measured on the wall clock, which costs no system call.
bool SpinPolicy::Spin::goes_on() {
  if (spin_ == Duration::zero()) return false;
  const auto now = Clock::now();
  if (!start_) start_ = now;
  if (now - *start_ < spin_) return true;
  const Duration used = thread_cpu_time();
  if (!end_) end_ = used + spin_;
  return used < *end_;
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
