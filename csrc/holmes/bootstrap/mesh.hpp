// Mesh: connects every pair of ranks of a communicator over the NICs chosen for it, with proof of the job's secret.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holmes/bootstrap/store.hpp"
#include "holmes/core/options.hpp"
#include "holmes/transport/channel.hpp"
#include "holmes/transport/connection.hpp"

namespace holmes {

// While connections are made, how often a rank looks whether that still makes sense.
inline constexpr Duration look_around_interval = std::chrono::seconds(1);

// Everything two ranks share: one socket of each purpose per rail; between ranks of one cluster the rails are those of
// CommunicatorOptions::cluster_nics, where given, else those of CommunicatorOptions::nics. Where both ranks are on one
// host and shared memory is used, there are instead one Unix socket, in `control`, and in `shared_memory` a sealed
// memfd of `shared_memory_bytes` that both sides hold (zeroed; made by the lower rank, passed with SCM_RIGHTS; no name
// anywhere). Over RDMA `rdma` holds the channels, and `collective` and `p2p` nothing.
struct PeerConnections {
  int peer = -1;
  std::string host;  // host name of the peer
  std::string nic;   // local interface of the first rail, the HCA ports, or "shm"
  std::vector<Connection> control;
  std::vector<Connection> collective;
  std::vector<Connection> p2p;
  struct {
    std::unique_ptr<Channel> collective;
    std::unique_ptr<Channel> p2p;
    std::vector<int> descriptors;
  } rdma;
  UniqueFd shared_memory;
  std::size_t shared_memory_bytes = 0;

  bool uses_shared_memory() const { return static_cast<bool>(shared_memory); }
};

struct Mesh {
  std::vector<PeerConnections> peers;  // indexed by rank; peers[own rank] is empty
  std::vector<std::string> hosts;      // host name of every rank
  std::optional<std::string> no_rdma;  // where a rank has ports, why they are not used

  // The descriptors of all of them, that a forked child must not keep open.
  std::vector<int> sockets() const;
};

// Collective over all ranks that use the same store and options.name. Binds every socket, listening and connecting, to
// its NIC's address and, where the kernel permits, to the device. Strangers and garbage are dropped and logged. On
// failure every rank throws: NicError, UnreachableError, ProtocolError, TimeoutError or SystemError, naming the
// culprit. `options.clusters` is empty or names each rank's. `shared_memory_bytes` is the size of each pair's segment.
Mesh connect_mesh(Store& store, const CommunicatorOptions& options, std::size_t shared_memory_bytes);

}  // namespace holmes
