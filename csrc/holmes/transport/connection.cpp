#include "holmes/transport/connection.hpp"

#include <linux/tcp.h>

#include "holmes/transport/socket.hpp"

namespace holmes {

std::unique_ptr<LinkUse> use_of(int fd, std::shared_ptr<Link> link) {
  return std::make_unique<LinkUse>(std::move(link), [fd]() -> std::optional<UseSample> {
    const auto info = tcp_info_of(fd);
    if (!info) return std::nullopt;
    return UseSample{.sent_bytes = info->tcpi_bytes_sent,
                     .delivered = info->tcpi_delivered,
                     .round_trip = std::chrono::microseconds(info->tcpi_rtt),
                     .is_under_way = info->tcpi_unacked > 0};
  });
}

ConnectionInfo Connection::current_info() const {
  ConnectionInfo current = info;
  if (const auto tcp = tcp_info_of(fd.get())) {
    current.retransmitted_segments = tcp->tcpi_total_retrans;
    current.round_trip_us = tcp->tcpi_rtt;
    current.busy_us = tcp->tcpi_busy_time;
    current.receiver_limited_us = tcp->tcpi_rwnd_limited;
    current.buffer_limited_us = tcp->tcpi_sndbuf_limited;
  }
  if (watch) {
    current.path_bytes_per_s = watch->bytes_per_s();
    current.path_changes = watch->changes();
  }
  if (use) {
    current.stalls = use->stalls().stalls();
    current.stalled_us = use->stalls().stalled_us();
  }
  return current;
}

}  // namespace holmes
