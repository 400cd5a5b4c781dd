#include "holmes/transport/rail_rate.hpp"

#include <algorithm>

namespace holmes {
namespace {

// Of the newest window. Measured rates of 10 ms windows on a shaped link differ by a tenth.
constexpr double newest_weight = 0.4;
constexpr double least_bytes_per_s = 1000;
// Less may be acknowledged late because the peer's kernel waits for more.
constexpr double telling_bytes = 48 * 1024;
constexpr double burst_trust = 0.5;

}  // namespace

void RailRate::observe(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy) {
  if (!start_) return;
  const double elapsed_s = std::chrono::duration<double>(now - *start_).count();
  const double bytes = static_cast<double>(acknowledged_bytes - start_bytes_);
  if (!is_busy) {
    // A short run may be a burst that a token bucket or a queue let pass. And a rail that is fast enough for what it
    // was given stays unknown: this bound may be far too low.
    const double trust = now - *start_ >= first_window ? 1 : burst_trust;
    const double at_least = elapsed_s > 0 ? trust * bytes / elapsed_s : 0;
    if (rate_ && from_idle_ && bytes >= telling_bytes && at_least > *rate_) rate_ = at_least;
    start_.reset();
    return;
  }
  if (!is_due(now)) return;
  const double measured = std::max(bytes / elapsed_s, least_bytes_per_s);
  rate_ = rate_ ? *rate_ + newest_weight * (measured - *rate_) : measured;
  disregard(now, acknowledged_bytes, is_busy);
}

void RailRate::disregard(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy) {
  start_.reset();
  if (!is_busy) return;
  start_ = now;
  start_bytes_ = acknowledged_bytes;
  from_idle_ = false;
}

}  // namespace holmes
