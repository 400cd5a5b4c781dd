#include "holmes/transport/path_watch.hpp"

#include <linux/tcp.h>

#include <algorithm>
#include <cmath>

#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// No more often than once in a round trip, of which each measurement is.
constexpr auto look_interval = std::chrono::milliseconds(50);
// Of the time between two looks at most: what lasted because the peer did not read tells nothing.
constexpr double most_waiting_share = 0.1;
constexpr double us_per_s = 1e6;

std::string megabits(double bytes_per_s) { return std::to_string(std::lround(bytes_per_s * 8e-6)); }

}  // namespace

std::optional<double> PathRate::observe(double bytes_per_s) {
  measured_[count_++ % measured_.size()] = bytes_per_s;
  if (count_ < measured_.size()) return std::nullopt;
  auto sorted = measured_;
  std::ranges::sort(sorted);
  if (sorted[sorted.size() - 2] > change * sorted[1]) return std::nullopt;
  rate_ = sorted[sorted.size() / 2];
  if (!told_) told_ = rate_;
  if (*rate_ <= change * *told_ && *told_ <= change * *rate_) return std::nullopt;
  return std::exchange(told_, rate_);
}

void PathWatch::look(Clock::time_point now) {
  const auto elapsed = now - looked_at_;
  if (elapsed < look_interval) return;
  const auto info = tcp_info_of(fd_);
  if (!info || (info->tcpi_min_rtt != ~0U && elapsed < std::chrono::microseconds(info->tcpi_min_rtt))) return;
  looked_at_ = now;
  const bool has_arrived = std::exchange(acknowledged_bytes_, info->tcpi_bytes_acked) != info->tcpi_bytes_acked;
  const std::uint64_t waiting_us =
      info->tcpi_rwnd_limited - std::exchange(receiver_limited_us_, info->tcpi_rwnd_limited);
  const bool had_unsent = std::exchange(had_unsent_, info->tcpi_notsent_bytes > 0);
  const double elapsed_s = std::chrono::duration<double>(elapsed).count();
  if (!had_unsent || !had_unsent_ || !has_arrived || info->tcpi_delivery_rate_app_limited ||
      static_cast<double>(waiting_us) > most_waiting_share * us_per_s * elapsed_s)
    return;
  const auto before = rate_.observe(static_cast<double>(info->tcpi_delivery_rate));
  if (const auto rate = rate_.bytes_per_s())
    bytes_per_s_.store(static_cast<std::uint64_t>(*rate), std::memory_order_relaxed);
  if (!before) return;
  changes_.store(changes() + 1, std::memory_order_relaxed);
  where_memory_allows([&] { tell(*before, *rate_.bytes_per_s(), info->tcpi_rtt / us_per_s); });
}

void PathWatch::tell(double before, double now_bytes_per_s, double round_trip_s) const {
  if (!log_enabled(LogLevel::info)) return;
  log(LogLevel::info, own_rank_,
      connection_ + " carries " + megabits(now_bytes_per_s) + " Mbit/s, before " + megabits(before) + "; round trip " +
          std::to_string(std::lround(round_trip_s * 1e3)) + " ms");
}

}  // namespace holmes
