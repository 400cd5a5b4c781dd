// The fake NCCL's wires: TCP connections between each pair of ranks, on the interface that NCCL_SOCKET_IFNAME names.
#pragma once

#include <netinet/in.h>

#include <atomic>
#include <cstddef>
#include <vector>

#include "plugin_net.hpp"

namespace fake_nccl {

// The operation that a block is part of.
enum class Part { message, all_reduce, reduce, reduce_scatter, broadcast, all_gather };

// A block for or from a peer. Blocks between two ranks match in order and must be of one size and one operation.
struct Transfer {
  int peer;
  char* data;
  std::size_t bytes;
  Part part = Part::message;
};

// The address of the first interface that NCCL_SOCKET_IFNAME names ("=a,b" or prefixes), else loopback. Port 0. Family
// 0 where there is no such interface.
sockaddr_in interface_address();

// Listens there, in a thread, until `size` ranks (the first one says how many) have called and been told of each other.
// Returns whether it listens; `address` then has the port.
bool start_root(sockaddr_in& address);

// Sockets to the others by rank, for blocks, and by rank behind these, for a byte for each block that the other begins
// to receive. Empty where `stop` came first or somebody could not be reached.
std::vector<int> connect_all(const sockaddr_in& root, int rank, int size, const std::atomic<bool>& stop);

// Moves all of them at once, and ends once each peer takes part; false where a peer is gone, sizes or operations
// differ, or `stop`. With the peers that `plugin` has, over it.
bool transfer(const std::vector<int>& sockets, const std::vector<Transfer>& sends, const std::vector<Transfer>& recvs,
              const std::atomic<bool>& stop, PluginNet* plugin = nullptr);

}  // namespace fake_nccl
