// PathQueue: how long packets wait on their path, by the round trips that TCP measures.
#pragma once

#include <limits>

#include "holmes/core/clock.hpp"

namespace holmes {

// As TCP_INFO has them.
struct RoundTrip {
  double smoothed_s;
  double variation_s;
  double shortest_s;  // of single packets
};

// What a round trip takes longer than the shortest (smoothed) one, without what it varies by: delays that vary, in
// order, let few packets through sooner than many, so that the shortest one of a slow stream is none that a fast one
// can have. A queue above the target of which none was short for four seconds, or which was above it on average for
// longer, belongs to the path from then on: it has become longer, or others never rest.
class PathQueue {
public:
  explicit PathQueue(double target_s) : target_s_(target_s) {}

  // The queue in seconds, below zero where it varies by more.
  double look(Clock::time_point now, const RoundTrip& round_trip);
  // Nothing is under way: the round trip is an old one.
  void rest(Clock::time_point now) { short_at_ = looked_at_ = now; }

private:
  static constexpr double none = std::numeric_limits<double>::infinity();

  const double target_s_;
  double base_s_ = 0;            // round trip without a queue; 0: not known
  double recent_base_s_ = none;  // the shortest since short_at_
  double mean_s_ = 0;            // of the queue
  Clock::time_point looked_at_{};
  Clock::time_point short_at_{};  // the queue was within the target
};

}  // namespace holmes
