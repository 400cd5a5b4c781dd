#include "holmes/transport/connection.hpp"

#include <linux/tcp.h>

#include "holmes/transport/socket.hpp"

namespace holmes {

ConnectionInfo Connection::current_info() const {
  ConnectionInfo current = info;
  if (const auto tcp = tcp_info_of(fd.get())) {
    current.retransmitted_segments = tcp->tcpi_total_retrans;
    current.round_trip_us = tcp->tcpi_rtt;
  }
  if (watch) {
    current.path_bytes_per_s = watch->bytes_per_s();
    current.path_changes = watch->changes();
  }
  return current;
}

}  // namespace holmes
