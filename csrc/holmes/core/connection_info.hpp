// ConnectionInfo: what is known of one connection of a communicator, for reports.
#pragma once

#include <cstdint>
#include <string>

namespace holmes {

// One established connection, as `Communicator::connections` reports it.
struct ConnectionInfo {
  int peer = 0;
  std::string host;            // of the peer
  std::string transport;       // "tcp", "shm" or "rdma"
  std::string purpose;         // "collective", "p2p" or "control"
  std::string interface;       // local NIC; the HCA port for rdma; empty for shm
  std::string local_address;   // "10.0.0.1:40000", as getsockname says; of rdma GID and queue pair
  std::string remote_address;  // as getpeername says
  bool device_bound = false;   // SO_BINDTODEVICE was permitted
  bool is_retired = false;     // a lost rail: the stream goes on without it
  bool is_between = false;     // clusters; where the ranks name none: the path is far
  std::string encryption;      // "TLSv1.3 TLS_AES_128_GCM_SHA256"; empty: none
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t retransmitted_segments = 0;  // TCP segments the system sent again
  std::uint64_t resent_chunks = 0;           // sent again on other rails, since this one was lost
  std::uint64_t round_trip_us = 0;           // as TCP measures it now; 0: it is not known
  // How long bytes waited to be sent or acknowledged; of that, while the peer did not read, and while the send buffer
  // was full.
  std::uint64_t busy_us = 0;
  std::uint64_t receiver_limited_us = 0;
  std::uint64_t buffer_limited_us = 0;
  std::uint64_t stalls = 0;      // how often bytes were under way and none arrived, see StallWatch
  std::uint64_t stalled_us = 0;  // in all
  // What a far path carries, all that share it together, while more is to be sent than it takes; 0: not known.
  std::uint64_t path_bytes_per_s = 0;
  std::uint64_t path_changes = 0;  // how often that became another rate, by more than a third
};

}  // namespace holmes
