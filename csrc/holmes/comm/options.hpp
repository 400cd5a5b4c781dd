// What a communicator is made of, and what a call may say.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/work.hpp"

namespace holmes {

// One local NIC a communicator uses: the interface and the address its sockets are bound to.
struct NicBinding {
  std::string interface;  // "ib0", "eth1", "lo"
  std::string address;    // numeric IPv4 or IPv6 address of that interface
};

// How ranks of one host reach each other.
enum class Transport {
  automatic,  // shared memory where both ranks are on one host, else TCP
  tcp,        // TCP also between ranks of one host
  shm,        // shared memory only; refused where ranks are on different hosts
};

// "auto", "tcp" or "shm". Throws UsageError for any other name.
Transport transport_from_name(const std::string& name);

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::string name = "world";  // appears in every error and log line; the same on all ranks, unique in the store
  // Rails, in the same order on every rank; a NIC named twice gets two connections (where one cannot fill the link).
  // Empty: loopback (one host only).
  std::vector<NicBinding> nics{};
  Transport transport = Transport::automatic;
  Duration timeout = std::chrono::minutes(30);          // deadline of an operation unless the call gives one
  Duration connect_timeout = std::chrono::seconds(60);  // deadline of the set-up
  std::string secret{};  // per-job secret; empty: HOLMES_SECRET, else made by rank 0 and shared by the Store
};

// Options every operation takes.
struct CallOptions {
  std::optional<Duration> timeout;  // absent: the communicator's
  bool async = false;               // false: the work is final on return (a failed one still throws in wait)
};

// One established connection, as `Communicator::connections` reports it.
struct ConnectionInfo {
  int peer = 0;
  std::string host;            // of the peer
  std::string transport;       // "tcp" or "shm"
  std::string purpose;         // "collective", "p2p" or "control"
  std::string interface;       // local NIC; empty for shm
  std::string local_address;   // "10.0.0.1:40000", as getsockname says
  std::string remote_address;  // as getpeername says
  bool device_bound = false;   // SO_BINDTODEVICE was permitted
  bool is_retired = false;     // a lost rail: the stream goes on without it
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

}  // namespace holmes
