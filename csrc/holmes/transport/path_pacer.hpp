// PathPacer: keeps a connection from the queues of its path, as far as those of higher priority need them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "holmes/core/options.hpp"
#include "holmes/transport/path_queue.hpp"
#include "holmes/transport/uplink.hpp"

namespace holmes {

// Nothing is known of the path but its round trip: what that is longer than its shortest is the queue before the
// narrowest link, whoever filled it. A connection of the highest priority sends as TCP does. Any other one sends at a
// rate at which the queue stays below a target, the shorter the lower its priority (as LEDBAT does, RFC 6817): it fills
// the link when it is alone and leaves it to whoever does not mind a longer queue, on this host or another. Of this
// process it knows more, and of the cluster's other hosts where it leaves the cluster (Uplink): while a connection of
// higher priority has something to send over the same NIC, or out of the cluster, it pauses, and where that lasts sends
// next to nothing; then it goes on at its rate.
//
// Of groups of one priority that take turns the later ones pause and go on in the same way.
//
// The kernel keeps the rate (SO_MAX_PACING_RATE). It is not set before a queue was seen: fast networks pay nothing.
// One thread at a time.
class PathPacer {
public:
  // `fd`: a TCP socket that lives as long. `crosses`: to another cluster.
  PathPacer(int fd, const Precedence& precedence, const std::string& interface, bool crosses);
  ~PathPacer();
  PathPacer(const PathPacer&) = delete;
  PathPacer& operator=(const PathPacer&) = delete;

  // Before bytes are given to the socket.
  void before_send(Clock::time_point now);
  // Nothing is to be given to the socket now. (A rate that is next to nothing would last: on a short path the kernel
  // spaces 64 KiB by the rate at which they were sent.)
  bool pauses() const { return pauses_; }
  // After they were given. Keeps errno.
  void after_send(Clock::time_point now);
  // Looks at the path, where it is time to, and sets the rate.
  void look(Clock::time_point now);
  // When to look again though nothing is sent; absent: never. `awaits_send`: there is more to send.
  std::optional<Clock::time_point> next_look(bool awaits_send) const {
    const bool may_change = rate_bytes_per_s_ || has_to_hear();
    return yields_ || has_turn_ || (awaits_send && may_change) ? std::optional(looked_at_ + look_interval)
                                                               : std::nullopt;
  }
  // What it keeps to now; absent: nothing.
  std::optional<double> rate_bytes_per_s() const { return rate_bytes_per_s_; }

private:
  static constexpr auto look_interval = std::chrono::milliseconds(4);

  bool has_unsent() const;
  // The first of all that it may yield to, itself where there are none.
  Precedence first() const { return {highest_priority, precedence_.turn ? std::optional(0) : std::nullopt}; }
  bool may_yield() const { return first().goes_before(precedence_); }
  bool has_to_hear() const { return crosses_ && may_yield() && uplink_->has_neighbours(first()); }
  bool has_to_yield(Clock::time_point now) const;
  void look_at_turn(Clock::time_point now);
  void forget_since(Clock::time_point now);
  void adapt(Clock::time_point now);
  void keep_to(std::optional<double> bytes_per_s);
  void limit_unsent();

  const int fd_;
  const Precedence precedence_;
  const double target_s_;  // of the queue; none for the highest priority, which is not paced
  const bool crosses_;
  const std::shared_ptr<Uplink> uplink_;
  std::atomic<Clock::rep> sent_at_{0};  // read by others
  Clock::time_point looked_at_{};
  Clock::time_point adapted_at_{};
  bool yields_ = false;
  bool pauses_ = false;
  Clock::time_point yields_since_{};
  bool has_turn_ = false;  // the hosts beside this one are told that it sends
  std::optional<double> rate_bytes_per_s_;
  std::optional<double> pace_bytes_per_s_;      // what the kernel was told: that rate, or less while others go first
  std::optional<unsigned> usual_unsent_bytes_;  // TCP_NOTSENT_LOWAT without a rate
  double shortest_s_ = 0;                       // round trip
  std::uint64_t acknowledged_bytes_ = 0;
  double capacity_bytes_per_s_ = 0;  // the most that was delivered lately
  PathQueue queue_;
};

}  // namespace holmes
