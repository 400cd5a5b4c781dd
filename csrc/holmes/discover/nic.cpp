#include "holmes/discover/nic.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <set>
#include <tuple>

#include "holmes/core/error.hpp"
#include "holmes/discover/pci.hpp"

namespace holmes {
namespace {

using Netdevs = std::map<std::string, Netdev>;

// The interfaces of a RoCE port are those its GID table names (a bond and VLANs too); of other ports, and of RoCE ports
// whose table is empty, the one its device shows for that port.
std::vector<std::string> netdevs_of(const RdmaPort& port, const Netdevs& netdevs) {
  std::set<std::string> names;
  if (port.is_roce)
    for (const auto& gid : port.gids)
      if (netdevs.contains(gid.netdev)) names.insert(gid.netdev);
  if (!names.empty()) return {names.begin(), names.end()};
  for (const auto& [name, netdev] : netdevs)
    if (!netdev.device.empty() && netdev.device == port.device && netdev.kind != NicKind::ipoib &&
        netdev.port_index == port.port - 1)
      return {name};
  return {};
}

// The devices an interface stands on in the end: its own, or its members'.
void collect_devices(const Sysfs& sysfs, const Netdevs& netdevs, const std::string& name, std::set<std::string>& seen,
                     std::vector<PciDevice>& devices) {
  const auto found = netdevs.find(name);
  if (found == netdevs.end() || !seen.insert(name).second) return;
  if (!found->second.device.empty()) {
    auto device = find_pci_device(sysfs, found->second.device);
    if (device && std::ranges::find(devices, *device) == devices.end()) devices.push_back(std::move(*device));
  } else {
    for (const auto& lower : found->second.lowers) collect_devices(sysfs, netdevs, lower, seen, devices);
  }
}

void place(Nic& nic, const std::vector<PciDevice>& devices, const std::vector<PciDevice>& gpus) {
  if (devices.empty()) return;
  if (devices.size() == 1) {
    nic.pci_address = devices.front().address;
    nic.pci_path = devices.front().path;
  }
  const auto node = devices.front().numa_node;
  if (std::ranges::all_of(devices, [&](const PciDevice& device) { return device.numa_node == node; }))
    nic.numa_node = node;
  std::set<std::string> nearest;
  for (const auto& device : devices)
    for (auto& address : nearest_gpus(device, gpus)) nearest.insert(std::move(address));
  nic.nearest_gpus.assign(nearest.begin(), nearest.end());
}

Nic nic_of(const Netdev& netdev) {
  Nic nic;
  nic.name = nic.netdev = netdev.name;
  nic.kind = netdev.kind;
  nic.nic_class = netdev.kind == NicKind::loopback ? NicClass::loopback
                  : netdev.is_infiniband           ? NicClass::infiniband
                                                   : NicClass::ethernet;
  nic.link_layer = netdev.kind == NicKind::loopback ? "Loopback" : netdev.is_infiniband ? "InfiniBand" : "Ethernet";
  nic.state = netdev.is_up ? "up" : netdev.state == "unknown" || netdev.state == "up" ? "down" : netdev.state;
  nic.is_up = nic.is_netdev_up = netdev.is_up;
  nic.addresses = netdev.addresses;
  nic.has_gateway = netdev.has_gateway;
  nic.speed_gbps = netdev.speed_gbps;
  nic.mtu = netdev.mtu;
  if (netdev.kind == NicKind::bond || netdev.kind == NicKind::bridge) nic.members = netdev.lowers;
  nic.master = netdev.master;
  nic.parent = netdev.parent;
  nic.vlan_id = netdev.vlan_id;
  nic.physical_function = netdev.physical_function;
  return nic;
}

// Lays the RDMA port over the interface's NIC (a fresh one, for a port without an interface).
void add_port(Nic& nic, const RdmaPort& port) {
  nic.hca = port.hca;
  nic.port = port.port;
  nic.link_layer = port.link_layer;
  nic.state = port.state;
  nic.is_up = port.state == "active";
  // Of an Ethernet link the interface knows best (a bond's speed is the sum of its members'); of InfiniBand the port.
  if (!nic.speed_gbps || port.link_layer == "InfiniBand") nic.speed_gbps = port.speed_gbps;
  for (const auto& gid : port.gids)
    if (gid.netdev.empty() || gid.netdev == nic.netdev) nic.gids.push_back(gid);
  if (port.link_layer == "InfiniBand") {
    nic.nic_class = NicClass::infiniband;
  } else if (port.is_roce) {
    const auto is_v2 = [](const Gid& gid) { return gid.type == "RoCE v2"; };
    nic.nic_class = nic.gids.empty() || std::ranges::any_of(nic.gids, is_v2) ? NicClass::roce_v2 : NicClass::roce_v1;
  }
  if (port.is_roce || port.link_layer == "InfiniBand")
    nic.gid_index = choose_gid_index(port, nic.netdev, nic.addresses);
}

std::vector<Nic> discover(const Sysfs& sysfs) {
  const Netdevs netdevs = read_netdevs(sysfs);
  const auto gpus = find_gpus(sysfs);
  std::map<std::string, Nic> nics;
  for (const auto& [name, netdev] : netdevs) nics.emplace(name, nic_of(netdev));
  for (const auto& port : read_rdma_ports(sysfs)) {
    const auto names = netdevs_of(port, netdevs);
    for (const auto& name : names) add_port(nics.at(name), port);
    if (names.empty() && (port.is_roce || port.link_layer == "InfiniBand")) {
      Nic nic;
      add_port(nic, port);
      nic.name = nic.port_name();
      if (const auto device = find_pci_device(sysfs, port.device)) place(nic, {*device}, gpus);
      nics.emplace(nic.name, std::move(nic));
    }
  }
  std::vector<Nic> result;
  for (auto& [name, nic] : nics) {
    std::vector<PciDevice> devices;
    std::set<std::string> seen;
    collect_devices(sysfs, netdevs, nic.netdev, seen, devices);
    place(nic, devices, gpus);
    if (const auto parent = nics.find(nic.parent); parent != nics.end() && !nic.speed_gbps)
      nic.speed_gbps = parent->second.speed_gbps;
    result.push_back(nic);
  }
  std::ranges::sort(result, [](const Nic& a, const Nic& b) {
    return a.nic_class != b.nic_class ? a.nic_class < b.nic_class : natural_less(a.name, b.name);
  });
  return result;
}

}  // namespace

bool natural_less(const std::string& a, const std::string& b) {
  const auto is_digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const auto end_i = std::find_if_not(a.begin() + i, a.end(), is_digit) - a.begin();
      const auto end_j = std::find_if_not(b.begin() + j, b.end(), is_digit) - b.begin();
      const auto x = std::stoull(a.substr(i, end_i - i)), y = std::stoull(b.substr(j, end_j - j));
      if (x != y) return x < y;
      i = end_i, j = end_j;
    } else if (a[i] != b[j]) {
      return a[i] < b[j];
    } else {
      ++i, ++j;
    }
  }
  return std::tuple(a.size() - i, a) < std::tuple(b.size() - j, b);
}

const char* to_string(NicClass nic_class) {
  static constexpr std::array names = {"infiniband", "roce_v2", "roce_v1", "ethernet", "loopback"};
  return names.at(static_cast<std::size_t>(nic_class));
}

std::string default_sysfs_root() {
  const char* root = std::getenv("HOLMES_SYSFS_ROOT");
  return root != nullptr && *root != '\0' ? root : "/sys";
}

std::vector<Nic> discover_nics(const std::string& sysfs_root) { return discover(Sysfs(sysfs_root)); }

std::optional<Nic> find_nic(const std::string& name, const std::string& sysfs_root) {
  const auto nics = discover_nics(sysfs_root);
  const auto by_name = std::ranges::find(nics, name, &Nic::name);
  if (by_name != nics.end()) return *by_name;
  for (const auto& nic : nics)
    if (nic.kind != NicKind::vlan && !nic.hca.empty() && (nic.hca == name || nic.port_name() == name)) return nic;
  return std::nullopt;
}

Nic Nic::with_address(const std::string& address) const {
  Nic nic = *this;
  const auto found = std::ranges::find(nic.addresses, address, &IpAddress::address);
  if (found == nic.addresses.end()) throw UsageError("NIC " + name + " does not have the address '" + address + "'");
  std::rotate(nic.addresses.begin(), found, found + 1);
  return nic;
}

}  // namespace holmes
