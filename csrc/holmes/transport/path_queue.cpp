#include "holmes/transport/path_queue.hpp"

#include <algorithm>
#include <utility>

namespace holmes {
namespace {

constexpr std::chrono::duration<double> patience = std::chrono::seconds(4);
// Evenly spread delays are longer than their shortest by twice their mean deviation.
constexpr double variations = 2;

}  // namespace

double PathQueue::look(Clock::time_point now, const RoundTrip& round_trip) {
  if (base_s_ == 0) {
    base_s_ = round_trip.shortest_s;
    short_at_ = looked_at_ = now;
  }
  base_s_ = std::min(base_s_, round_trip.smoothed_s);
  const double weight = std::min(1.0, (now - looked_at_) / patience);
  looked_at_ = now;
  double queue_s = round_trip.smoothed_s - base_s_ - variations * round_trip.variation_s;
  if (queue_s <= target_s_) {
    short_at_ = now;
    recent_base_s_ = none;
  } else if (recent_base_s_ = std::min(recent_base_s_, round_trip.smoothed_s); now - short_at_ > patience) {
    queue_s -= recent_base_s_ - base_s_;
    base_s_ = std::exchange(recent_base_s_, none);
    short_at_ = now;
  }
  mean_s_ += weight * (queue_s - mean_s_);
  if (mean_s_ > target_s_) base_s_ += weight * mean_s_;
  return queue_s;
}

}  // namespace holmes
