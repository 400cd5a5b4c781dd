#include "holmes/transport/path_pacer.hpp"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// Of the queue, by priority.
constexpr std::array<double, highest_priority> targets_s{0.01, 0.02, 0.03};
// While others send it pauses, and where they go on for longer, sends a share of what the path carried. (Each host
// behind an uplink takes that share, and of a link that it found empty now and then.)
constexpr auto pause = std::chrono::milliseconds(500);
constexpr double yielding_share = 1.0 / 16;
// So much is always sent: at low rates the peer acknowledges late, which looks like a queue.
constexpr double least_share = 0.4;
constexpr double least_pace_bytes_per_s = 64 * 1024;
constexpr double begin_share = 0.9;  // of what was delivered when the queue became too long
constexpr double growth_share = 0.15;
constexpr double most_decrease = 0.5;
constexpr double forget = 0.995;  // of what the path carried, at each adaption
constexpr double forget_limited = 0.999;
constexpr double free_share = 1.5;  // of what the path carried: a rate beyond does not limit
// What the socket may hold that is not sent, so that a changed rate or a pause has effect soon.
constexpr double unsent_s = 0.004;
constexpr double unsent_round_trips = 1.0 / 8;  // where that is longer: soon is later there
constexpr double least_unsent_bytes = 16 * 1024;
constexpr double most_unsent_bytes = 512 * 1024;
constexpr auto shortest_adaption = std::chrono::milliseconds(10);
constexpr auto longest_adaption = std::chrono::milliseconds(100);

// Those of the highest priority that wait for a turn: what they have sent already is in front of whose turn it is.
double target_of(const Precedence& precedence) {
  if (precedence.priority < highest_priority) return targets_s[static_cast<std::size_t>(precedence.priority)];
  return precedence.turn.value_or(0) > 0 ? targets_s.back() : 0;
}

}  // namespace

PathPacer::PathPacer(int fd, const Precedence& precedence, const std::string& interface, bool crosses)
    : fd_(fd),
      precedence_(precedence),
      target_s_(target_of(precedence)),
      crosses_(crosses),
      uplink_(Uplink::of(interface)),
      queue_(target_s_) {
  uplink_->add(*this);
}

PathPacer::~PathPacer() {
  uplink_->remove(*this);
  if (has_turn_) uplink_->end_turn(precedence_);
}

void PathPacer::before_send(Clock::time_point now) {
  sent_at_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  look(now);
}

// What the path takes at once is not worth telling.
void PathPacer::after_send(Clock::time_point now) {
  if (!crosses_ || has_turn_) return;
  const int error = errno;
  if (uplink_->has_neighbours(precedence_) && has_unsent()) {
    has_turn_ = true;
    uplink_->begin_turn(precedence_, now);
  }
  errno = error;
}

void PathPacer::look_at_turn(Clock::time_point now) {
  const Clock::time_point sent_at{Clock::duration(sent_at_.load(std::memory_order_relaxed))};
  if (now - sent_at < look_interval || has_unsent()) return uplink_->keep_turn(precedence_, now);
  has_turn_ = false;
  uplink_->end_turn(precedence_);
}

void PathPacer::look(Clock::time_point now) {
  if (now - looked_at_ < look_interval) return;
  looked_at_ = now;
  if (has_turn_) look_at_turn(now);
  if (!may_yield()) return;
  if (has_to_hear()) uplink_->hear(now);
  const bool yields = has_to_yield(now);
  const bool pauses = yields && (!yields_ || now - yields_since_ < pause);
  if (yields != yields_ || pauses != pauses_) {
    if (yields && !yields_) yields_since_ = now;
    if (!yields) forget_since(now);
    yields_ = yields;
    pauses_ = pauses;
    keep_to(rate_bytes_per_s_);
  }
  if (!yields_) adapt(now);
}

// What was delivered meanwhile, and the round trip of before it, tell nothing about the path.
void PathPacer::forget_since(Clock::time_point now) {
  adapted_at_ = now;
  if (const auto info = tcp_info_of(fd_)) acknowledged_bytes_ = info->tcpi_bytes_acked;
}

bool PathPacer::has_unsent() const {
  int bytes = 0;
  return ::ioctl(fd_, SIOCOUTQNSD, &bytes) == 0 && bytes > 0;
}

bool PathPacer::has_to_yield(Clock::time_point now) const {
  constexpr auto recent = std::chrono::seconds(2);
  if (crosses_ && uplink_->gives_way(precedence_, now)) return true;
  return uplink_->has_any([&](const PathPacer& other) {
    if (!other.precedence_.goes_before(precedence_)) return false;
    const Clock::time_point sent_at{Clock::duration(other.sent_at_.load(std::memory_order_relaxed))};
    return now - sent_at < look_interval || (now - sent_at < recent && other.has_unsent());
  });
}

void PathPacer::adapt(Clock::time_point now) {
  const auto known = tcp_info_of(fd_);
  if (!known || known->tcpi_rtt == 0) return;
  const tcp_info& info = *known;
  const double round_trip_s = info.tcpi_rtt * 1e-6;
  const auto interval =
      std::clamp<Clock::duration>(std::chrono::microseconds(info.tcpi_rtt), shortest_adaption, longest_adaption);
  const auto elapsed = now - adapted_at_;
  if (elapsed < interval) return;
  adapted_at_ = now;
  // The system's own estimate takes bursts that a link's bucket lets pass for its rate.
  const double delivered =
      static_cast<double>(info.tcpi_bytes_acked - acknowledged_bytes_) / std::chrono::duration<double>(elapsed).count();
  acknowledged_bytes_ = info.tcpi_bytes_acked;
  if (info.tcpi_unacked == 0 && delivered == 0) return queue_.rest(now);
  capacity_bytes_per_s_ = std::max(capacity_bytes_per_s_ * (rate_bytes_per_s_ ? forget_limited : forget), delivered);
  shortest_s_ = info.tcpi_min_rtt == ~0U ? round_trip_s : info.tcpi_min_rtt * 1e-6;
  const double queue_s = queue_.look(now, {round_trip_s, info.tcpi_rttvar * 1e-6, shortest_s_});
  if (!rate_bytes_per_s_) {
    if (queue_s > target_s_) return keep_to(begin_share * capacity_bytes_per_s_);
    return limit_unsent();
  }
  double rate = *rate_bytes_per_s_;
  if (queue_s > target_s_) {
    rate *= std::max(most_decrease, 1 - (queue_s / target_s_ - 1) / 4);
  } else {
    rate += growth_share * capacity_bytes_per_s_ * (1 - queue_s / target_s_);
  }
  if (rate > free_share * capacity_bytes_per_s_) return keep_to(std::nullopt);
  keep_to(std::max(rate, least_share * capacity_bytes_per_s_));
}

void PathPacer::keep_to(std::optional<double> bytes_per_s) {
  rate_bytes_per_s_ = bytes_per_s;
  if (yields_ && !pauses_) bytes_per_s = yielding_share * capacity_bytes_per_s_;
  if (bytes_per_s) bytes_per_s = std::max(*bytes_per_s, least_pace_bytes_per_s);
  pace_bytes_per_s_ = bytes_per_s;
  set_option(fd_, SOL_SOCKET, SO_MAX_PACING_RATE,
             bytes_per_s ? static_cast<std::uint64_t>(*bytes_per_s) : ~std::uint64_t{0});
  limit_unsent();
}

// What is in the socket is sent though others go first.
void PathPacer::limit_unsent() {
  if (!usual_unsent_bytes_) {
    unsigned usual = 0;
    socklen_t length = sizeof usual;
    ::getsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &usual, &length);
    usual_unsent_bytes_ = usual > 0 ? usual : ~0U;  // 0: the system's, which is no limit
  }
  unsigned bytes = *usual_unsent_bytes_;
  // A far path may be full without a queue, and so without a rate. Those that take turns begin together.
  const bool is_far = shortest_s_ >= std::chrono::duration<double>(far_round_trip).count();
  if (pace_bytes_per_s_ || is_far || precedence_.turn) {
    const double seconds = std::max(unsent_s, unsent_round_trips * shortest_s_);
    const double soon = pace_bytes_per_s_.value_or(capacity_bytes_per_s_) * seconds;
    bytes = std::min(bytes, static_cast<unsigned>(std::clamp(soon, least_unsent_bytes, most_unsent_bytes)));
  }
  set_option(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, bytes);
}

}  // namespace holmes
