// RDMA ports of this host, with their GID tables, from sysfs alone: no verbs library.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/addresses.hpp"
#include "holmes/discover/sysfs.hpp"

namespace holmes {

// One used entry of a port's GID table.
struct Gid {
  int index = 0;
  std::string gid;     // "0000:0000:0000:0000:0000:ffff:0a01:0001"
  std::string type;    // "IB", "RoCE v1" or "RoCE v2"
  std::string netdev;  // interface it belongs to; empty on InfiniBand

  bool operator==(const Gid&) const = default;
};

struct RdmaPort {
  std::string hca;
  int port = 1;
  std::string device;      // path of the HCA's device below the root
  std::string link_layer;  // "InfiniBand", "Ethernet"
  bool is_roce = false;    // speaks RoCE; false on InfiniBand and on iWARP or EFA ports
  std::string state;       // "active", "down", "init", "armed", ...
  std::optional<double> speed_gbps;
  std::vector<Gid> gids;
};

// Every port of every HCA, by HCA and port.
std::vector<RdmaPort> read_rdma_ports(const Sysfs& sysfs);

// The GID to use for `netdev`, whose addresses are given; absent where the table has none for it. InfiniBand: index 0.
// RoCE: v2 before v1; then an IPv4-mapped GID of one of the addresses, another of the addresses, any IPv4-mapped, the
// rest.
std::optional<int> choose_gid_index(const RdmaPort& port, const std::string& netdev,
                                    const std::vector<IpAddress>& addresses);

}  // namespace holmes
