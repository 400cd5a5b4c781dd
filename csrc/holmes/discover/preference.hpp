// Preference: which of the networks that a group's members share comes first, and which serve it together as rails. The
// one place of that rule (docs/nics.md): default groups, planned groups, NCCL's and those of C++ all ask here.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "holmes/discover/nic.hpp"

namespace holmes {

// A network with a NIC of every member of a group, as far as its place among others depends on it.
struct SharedNetwork {
  NicClass nic_class = NicClass::ethernet;
  bool is_rdma = false;               // used by verbs; false: through sockets
  bool is_routed = false;             // several subnets joined by gateways
  bool is_plain = true;               // no member's NIC is a VLAN, a bridge or the like
  std::optional<double> rate_gbps{};  // of its slowest member, measured where it was; absent: unknown
  std::optional<int> max_rails{};     // so many rails, whatever their rates; absent: all that are alike
  std::int64_t hosts = 0;             // which hosts it joins: rails join the same ones
  std::size_t size = 0;               // how many
  std::vector<std::int64_t> wires{};  // the members' NICs, a number each: no two rails go through one
};

// True where both are of one class and about one rate, so that one operation may be striped over them.
bool are_alike(const SharedNetwork& one, const SharedNetwork& other);

// The networks, best first, as indices into `networks`: each with the rails that serve a group together with it, itself
// the first. A network counts with the rate of all its rails. Rates within a quarter of the best are equal: then RDMA
// comes before sockets, a better class first (InfiniBand, RoCE v2, RoCE v1, Ethernet), then plain NICs, the higher
// rate, more hosts, the order given. Routed ones come last.
std::vector<std::vector<std::size_t>> best_first(const std::vector<SharedNetwork>& networks);

}  // namespace holmes
