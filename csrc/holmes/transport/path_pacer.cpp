#include "holmes/transport/path_pacer.hpp"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// Of the queue, by priority.
constexpr std::array<double, highest_priority> target_s{0.01, 0.02, 0.03};
// After so long with a longer queue, what is left of it belongs to the path: it has become longer, or others never
// rest.
constexpr auto patience = std::chrono::seconds(4);
constexpr double yielding_share = 1.0 / 16;  // of what the path carried, while others of this process send
// So much is always sent: at low rates the peer acknowledges late, which looks like a queue.
constexpr double least_share = 0.4;
constexpr double least_pace_bytes_per_s = 64 * 1024;
constexpr double begin_share = 0.9;  // of what was delivered when the queue became too long
constexpr double growth_share = 0.15;
constexpr double most_decrease = 0.5;
constexpr double forget = 0.995;  // of what the path carried, at each adaption
constexpr double forget_limited = 0.999;
constexpr double free_share = 1.5;  // of what the path carried: a rate beyond does not limit
// What the socket may hold that is not sent, so that a changed rate has effect soon.
constexpr double unsent_s = 0.01;
constexpr double least_unsent_bytes = 16 * 1024;
constexpr double most_unsent_bytes = 512 * 1024;
constexpr auto shortest_adaption = std::chrono::milliseconds(10);
constexpr auto longest_adaption = std::chrono::milliseconds(100);

}  // namespace

struct PathPacer::Interface {
  std::mutex mutex;
  std::vector<const PathPacer*> pacers;

  static std::shared_ptr<Interface> get(const std::string& name) {
    // Never destroyed: threads of a process that ends may connect still.
    static auto& all = *new std::map<std::string, std::weak_ptr<Interface>>();
    static std::mutex all_mutex;
    const std::lock_guard lock(all_mutex);
    auto& known = all[name];
    auto interface = known.lock();
    if (!interface) known = interface = std::make_shared<Interface>();
    return interface;
  }
};

PathPacer::PathPacer(int fd, int priority, const std::string& interface)
    : fd_(fd), priority_(priority), interface_(Interface::get(interface)) {
  const std::lock_guard lock(interface_->mutex);
  interface_->pacers.push_back(this);
}

PathPacer::~PathPacer() {
  const std::lock_guard lock(interface_->mutex);
  std::erase(interface_->pacers, this);
}

void PathPacer::before_send(Clock::time_point now) {
  sent_at_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  look(now);
}

void PathPacer::look(Clock::time_point now) {
  if (priority_ >= highest_priority || now - looked_at_ < look_interval) return;
  looked_at_ = now;
  const bool yields = has_to_yield(now);
  if (yields != yields_) {
    yields_ = yields;
    keep_to(rate_bytes_per_s_);
  }
  if (!yields_) adapt(now);
}

bool PathPacer::has_unsent() const {
  int bytes = 0;
  return ::ioctl(fd_, SIOCOUTQNSD, &bytes) == 0 && bytes > 0;
}

bool PathPacer::has_to_yield(Clock::time_point now) const {
  constexpr auto recent = std::chrono::seconds(2);
  const std::lock_guard lock(interface_->mutex);
  return std::ranges::any_of(interface_->pacers, [&](const PathPacer* other) {
    if (other->priority_ <= priority_) return false;
    const Clock::time_point sent_at{Clock::duration(other->sent_at_.load(std::memory_order_relaxed))};
    return now - sent_at < look_interval || (now - sent_at < recent && other->has_unsent());
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
  if (base_s_ == 0) {
    base_s_ = info.tcpi_min_rtt == ~0U ? round_trip_s : info.tcpi_min_rtt * 1e-6;
    short_at_ = now;
    recent_base_s_ = round_trip_s;
  }
  base_s_ = std::min(base_s_, round_trip_s);
  const double target = target_s[static_cast<std::size_t>(priority_)];
  const double queue_s = round_trip_s - base_s_;
  if (info.tcpi_unacked == 0 && delivered == 0) {  // idle: the round trip is an old one
    short_at_ = now;
    return;
  }
  capacity_bytes_per_s_ = std::max(capacity_bytes_per_s_ * (rate_bytes_per_s_ ? forget_limited : forget), delivered);
  if (queue_s <= target) {
    short_at_ = now;
    recent_base_s_ = round_trip_s;
  } else if (recent_base_s_ = std::min(recent_base_s_, round_trip_s); now - short_at_ > patience) {
    base_s_ = recent_base_s_;
    short_at_ = now;
    return;
  }
  if (!rate_bytes_per_s_) {
    if (queue_s > target) keep_to(begin_share * capacity_bytes_per_s_);
    return;
  }
  double rate = *rate_bytes_per_s_;
  if (queue_s > target) {
    rate *= std::max(most_decrease, 1 - (queue_s / target - 1) / 4);
  } else {
    rate += growth_share * capacity_bytes_per_s_ * (1 - queue_s / target);
  }
  if (rate > free_share * capacity_bytes_per_s_) return keep_to(std::nullopt);
  keep_to(std::max(rate, least_share * capacity_bytes_per_s_));
}

void PathPacer::keep_to(std::optional<double> bytes_per_s) {
  rate_bytes_per_s_ = bytes_per_s;
  if (yields_) bytes_per_s = yielding_share * capacity_bytes_per_s_;
  const double rate = bytes_per_s ? std::max(*bytes_per_s, least_pace_bytes_per_s) : 0;
  set_option(fd_, SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s ? static_cast<std::uint64_t>(rate) : ~std::uint64_t{0});
  const double unsent_bytes = std::clamp(rate * unsent_s, least_unsent_bytes, most_unsent_bytes);
  if (!usual_unsent_bytes_) {
    unsigned usual = ~0U;
    socklen_t length = sizeof usual;
    ::getsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &usual, &length);
    usual_unsent_bytes_ = usual;
  }
  set_option(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT,
             bytes_per_s ? std::min(static_cast<unsigned>(unsent_bytes), *usual_unsent_bytes_) : *usual_unsent_bytes_);
}

}  // namespace holmes
