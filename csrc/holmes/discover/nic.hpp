// Nic: one way out of this host, as data. Found without root, GPU or verbs library.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/addresses.hpp"
#include "holmes/discover/netdev.hpp"
#include "holmes/discover/rdma.hpp"

namespace holmes {

enum class NicClass { infiniband, roce_v2, roce_v1, ethernet, loopback };
const char* to_string(NicClass nic_class);
// "eth2" before "eth10".
bool natural_less(const std::string& a, const std::string& b);

// A network interface with the RDMA port below it, or an RDMA port that has no interface.
struct Nic {
  std::string name;  // the interface ("ib0", "eth1"); of an RDMA port without one "mlx5_0:1"
  NicClass nic_class = NicClass::ethernet;
  NicKind kind = NicKind::physical;
  std::string netdev;  // network interface; empty if none
  std::string hca;     // RDMA device; empty if none
  std::optional<int> port;
  std::string link_layer;     // "InfiniBand", "Ethernet" or "Loopback"
  std::string state;          // of the RDMA port ("active", "down", "init"), else of the interface ("up", "down")
  bool is_up = false;         // the RDMA port is active; without one, the interface is up
  bool is_netdev_up = false;  // the interface carries packets
  std::vector<IpAddress> addresses;       // IPv4 first, link-local last
  bool has_gateway = false;               // a route through it uses a gateway
  std::optional<double> speed_gbps;       // line rate
  std::optional<int> mtu;                 // bytes
  std::optional<int> numa_node;           // absent where unknown or where a bond's members differ
  std::string pci_address;                // "0000:16:00.0"; empty for software interfaces over several devices
  std::string pci_path;                   // below the sysfs root
  std::vector<Gid> gids;                  // of this interface
  std::optional<int> gid_index;           // the one to use
  std::vector<std::string> nearest_gpus;  // PCI addresses; those at the smallest PCI distance
  std::vector<std::string> members;       // of a bond or bridge
  std::string master;                     // the bond or bridge it belongs to
  std::string parent;                     // of a VLAN or an IPoIB child
  std::optional<int> vlan_id;
  std::string physical_function;  // PCI address of a virtual function's physical function, where shown

  // A copy whose first address is `address`, the one to bind. Throws UsageError where it has no such one.
  Nic with_address(const std::string& address) const;
  bool operator==(const Nic&) const = default;
  std::string port_name() const { return hca.empty() ? "" : hca + ":" + std::to_string(port.value_or(1)); }
};

// HOLMES_SYSFS_ROOT if set, else "/sys".
std::string default_sysfs_root();

// All NICs, by class and name. Throws UsageError where the root is no folder, SystemError where the kernel refuses.
std::vector<Nic> discover_nics(const std::string& sysfs_root = default_sysfs_root());

// The NIC called `name`: an interface ("eth1"), a port ("mlx5_0:1") or an HCA ("mlx5_0", its first port).
std::optional<Nic> find_nic(const std::string& name, const std::string& sysfs_root = default_sysfs_root());

}  // namespace holmes
