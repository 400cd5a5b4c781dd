// NicChoice: from what every rank of a group has to the NICs that the group uses. A pure function (docs/nics.md).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/core/error.hpp"
#include "holmes/discover/nic.hpp"

namespace holmes {

// What moves a group's bytes.
enum class Carrier {
  tcp,        // sockets of ours
  nccl,       // NCCL: RDMA ports, or sockets of its own
  rdma,       // RDMA ports of each rank, and sockets of ours for the set-up
  automatic,  // sockets of ours, and RDMA ports where all ranks share some that are no slower
};

// One way by which a NIC may reach others: an address of an interface or, for RDMA, of a port (a GID's prefix where the
// port has no other one).
struct NicCandidate {
  std::string nic;
  std::string port{};  // "mlx5_0:1"; of RDMA
  NicClass nic_class = NicClass::ethernet;
  NicKind kind = NicKind::physical;
  std::string link_layer;
  std::string wire;       // a VLAN shares its parent's
  double speed_gbps = 0;  // 0 where unknown
  IpAddress address;
  bool has_gateway = false;
  bool is_rdma = false;
  bool is_gid = false;      // the address is a GID that says no more than its subnet prefix
  bool is_selected = true;  // false: only for NCCL's handshakes
};

// The ways of a NIC: those through sockets, of every address that is not link-local, and those by RDMA, where its port
// is active. `subnet`: only addresses in it ("10.1.0.0/16"); empty: all.
std::vector<NicCandidate> socket_candidates(const Nic& nic, const std::string& subnet = "");
std::vector<NicCandidate> rdma_candidates(const Nic& nic, const std::string& subnet = "");

// An interface of a rank and the address to bind.
struct NicAddress {
  std::string nic;
  std::string address;

  bool operator==(const NicAddress&) const = default;
};

// What one rank brings.
struct NicOffer {
  std::string host;        // for messages
  std::string place;       // of the machine and its network namespace: ranks of one place share their interfaces
  std::string cluster;     // that the rank names; all or none do
  bool restricts = false;  // its selection asks for something
  bool wants_rdma = false;
  std::string no_rdma{};           // why it takes no RDMA, whatever ports it has: what follows its name
  std::optional<int> max_rails{};  // absent: no wish; the smallest number counts
  int streams = 1;                 // over each NIC; the smallest number counts
  std::vector<NicCandidate> candidates{};
  std::optional<NicAddress> loopback{};
  std::string inventory{};             // all its NICs in words, for messages
  std::optional<ErrorKind> failure{};  // why it has nothing to bring
  std::string failure_text{};
  ErrorContext failure_context{};
};

// What the group uses.
struct NicChoice {
  // By rank: interface and address of each rail, in the same order on every rank. For NCCL over RDMA: what its
  // handshakes use.
  std::vector<std::vector<NicAddress>> sockets;
  std::vector<std::vector<std::string>> ports;  // by rank: HCA ports for RDMA; without entries: sockets
  std::string reason;                           // in words
};

// The rule, the same on every rank; where these name several clusters, RDMA is for inside them and sockets join them.
// Throws the error of the first rank that brings one, and NicError where RDMA is
// asked for and not all have it, nothing is shared, or only some name a cluster; both name the rank as the peer.
NicChoice choose_nics(const std::vector<NicOffer>& offers, Carrier carrier);

}  // namespace holmes
