// Netdev: one network interface as sysfs shows it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/addresses.hpp"
#include "holmes/discover/sysfs.hpp"

namespace holmes {

enum class NicKind { physical, virtual_function, bond, vlan, bridge, virtual_device, wireless, ipoib, loopback };
const char* to_string(NicKind kind);

struct Netdev {
  std::string name;
  NicKind kind = NicKind::physical;
  bool is_infiniband = false;  // link type InfiniBand (IPoIB)
  std::string state;           // operstate, or "up" where only the carrier says so yet
  bool is_up = false;          // carries packets
  std::optional<double> speed_gbps;
  std::optional<int> mtu;
  int port_index = 0;               // which port of its device it is, from 0
  std::string device;               // path of the device below the root; empty for software interfaces
  std::vector<std::string> lowers;  // a bond's or bridge's members, a VLAN's parent
  std::string master;               // the bond or bridge it belongs to
  std::string parent;               // of a VLAN or an IPoIB child
  std::optional<int> vlan_id;
  std::string physical_function;  // PCI address of a virtual function's physical function, where shown
  bool has_gateway = false;       // a route through this interface uses a gateway
  std::vector<IpAddress> addresses;
};

// Every interface, by name. Throws UsageError on a malformed file `addresses` of a recorded machine.
std::map<std::string, Netdev> read_netdevs(const Sysfs& sysfs);

}  // namespace holmes
