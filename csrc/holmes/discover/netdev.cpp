#include "holmes/discover/netdev.hpp"

#include <linux/if_arp.h>
#include <linux/if_vlan.h>
#include <linux/route.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <set>
#include <sstream>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

std::string uevent_value(const Sysfs& sysfs, const std::string& folder, const std::string& key) {
  std::istringstream lines(sysfs.read(folder + "/uevent").value_or(""));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(key + "=")) return line.substr(key.size() + 1);
  return "";
}

// A virtual function as its guest sees it: no link to the physical function, only the driver or the PCI id tell.
bool is_guest_virtual_function(const Sysfs& sysfs, const std::string& device) {
  static constexpr std::array drivers = {"iavf", "i40evf", "ixgbevf", "igbvf", "bnxt_en_vf", "cxgb4vf", "mana"};
  static constexpr std::array mellanox_ids = {"0x1004", "0x1014", "0x1016", "0x1018", "0x101a", "0x101c", "0x101e"};
  const std::string driver = sysfs.resolve_name(device + "/driver").value_or("");
  if (std::find(drivers.begin(), drivers.end(), driver) != drivers.end()) return true;
  return sysfs.read(device + "/vendor") == "0x15b3" &&
         std::find(mellanox_ids.begin(), mellanox_ids.end(), sysfs.read(device + "/device").value_or("")) !=
             mellanox_ids.end();
}

NicKind find_kind(const Sysfs& sysfs, const std::string& folder, const Netdev& netdev) {
  const std::string type = uevent_value(sysfs, folder, "DEVTYPE");
  if (sysfs.read_integer(folder + "/type") == ARPHRD_LOOPBACK) return NicKind::loopback;
  if (type == "bond" || sysfs.is_folder(folder + "/bonding")) return NicKind::bond;
  if (type == "vlan") return NicKind::vlan;
  if (type == "bridge" || sysfs.is_folder(folder + "/bridge")) return NicKind::bridge;
  if (type == "wlan" || sysfs.exists(folder + "/phy80211")) return NicKind::wireless;
  if (netdev.is_infiniband && sysfs.exists(folder + "/parent")) return NicKind::ipoib;
  if (netdev.device.empty()) return NicKind::virtual_device;
  if (sysfs.exists(netdev.device + "/physfn") || is_guest_virtual_function(sysfs, netdev.device))
    return NicKind::virtual_function;
  return NicKind::physical;
}

// A recorded machine says it in proc/net/vlan/config; that file needs root on a running one, the ioctl does not.
std::optional<int> find_vlan_id(const Sysfs& sysfs, const std::string& name) {
  std::istringstream lines(sysfs.read("proc/net/vlan/config").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string device, bar;
    int id = 0;
    if (words >> device >> bar >> id && device == name) return id;
  }
  if (sysfs.is_recorded()) return std::nullopt;
  const UniqueFd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  vlan_ioctl_args request{};
  request.cmd = GET_VLAN_VID_CMD;
  std::strncpy(request.device1, name.c_str(), sizeof request.device1 - 1);
  if (!fd || ioctl(fd.get(), SIOCGIFVLAN, &request) != 0) return std::nullopt;
  return request.u.VID;
}

unsigned long parse_hexadecimal(const std::string& text) {
  unsigned long value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value, 16);
  return value;
}

std::set<std::string> find_gateways(const Sysfs& sysfs) {
  std::set<std::string> interfaces;
  std::istringstream ipv4(sysfs.read_proc("net/route").value_or("")),
      ipv6(sysfs.read_proc("net/ipv6_route").value_or(""));
  for (std::string line; std::getline(ipv4, line);) {
    std::istringstream words(line);
    std::string name, destination, gateway, flags;
    if (words >> name >> destination >> gateway >> flags && (parse_hexadecimal(flags) & RTF_GATEWAY) != 0)
      interfaces.insert(name);
  }
  for (std::string line; std::getline(ipv6, line);) {
    std::istringstream stream(line);
    std::array<std::string, 10>
        words;  // destination, length, source, length, gateway, metric, references, use, flags, name
    for (auto& word : words) stream >> word;
    if ((parse_hexadecimal(words[8]) & RTF_GATEWAY) != 0) interfaces.insert(words[9]);
  }
  return interfaces;
}

// Operstate where the driver keeps one. The kernel tells of a carrier there up to a second after it has come.
std::string find_state(const Sysfs& sysfs, const std::string& folder, bool has_flag) {
  const auto state = sysfs.read(folder + "/operstate").value_or("unknown");
  const bool has_carrier = has_flag && sysfs.read_integer(folder + "/carrier") == 1;
  return state == "down" && has_carrier ? "up" : state;
}

Netdev read_netdev(const Sysfs& sysfs, const std::string& name, const InterfaceAddresses& kernel) {
  const std::string folder = "class/net/" + name;
  Netdev netdev;
  netdev.name = name;
  netdev.addresses = kernel.addresses;
  netdev.is_infiniband = sysfs.read_integer(folder + "/type") == ARPHRD_INFINIBAND;
  netdev.device = sysfs.resolve(folder + "/device").value_or("");
  netdev.kind = find_kind(sysfs, folder, netdev);
  const bool has_flag = (sysfs.read_integer(folder + "/flags").value_or(IFF_UP) & IFF_UP) != 0;
  netdev.state = find_state(sysfs, folder, has_flag);
  // The running kernel's word, where there is one, prevails: the root may be older than the link.
  netdev.is_up = kernel.running.value_or(true) && (netdev.state == "up" || (netdev.state == "unknown" && has_flag));
  if (const auto mbps = sysfs.read_integer(folder + "/speed"); mbps && *mbps > 0)  // -1: unknown
    netdev.speed_gbps = static_cast<double>(*mbps) / 1000;
  if (const auto mtu = sysfs.read_integer(folder + "/mtu")) netdev.mtu = static_cast<int>(*mtu);
  netdev.port_index = static_cast<int>(std::max(sysfs.read_integer(folder + "/dev_port").value_or(0),
                                                sysfs.read_integer(folder + "/dev_id").value_or(0)));
  for (const auto& entry : sysfs.list(folder))
    if (entry.starts_with("lower_")) netdev.lowers.push_back(entry.substr(6));
  netdev.master = sysfs.resolve_name(folder + "/master").value_or("");
  if (netdev.kind == NicKind::vlan) {
    netdev.vlan_id = find_vlan_id(sysfs, name);
    if (!netdev.lowers.empty()) netdev.parent = netdev.lowers.front();
  } else if (netdev.kind == NicKind::ipoib) {
    netdev.parent = sysfs.read(folder + "/parent").value_or("");
  }
  if (!netdev.device.empty()) netdev.physical_function = sysfs.resolve_name(netdev.device + "/physfn").value_or("");
  return netdev;
}

// Where sysfs is not mounted, or shows another network namespace, the kernel's list still tells the essentials.
Netdev netdev_without_sysfs(const std::string& name, const InterfaceAddresses& kernel) {
  Netdev netdev;
  netdev.name = name;
  netdev.addresses = kernel.addresses;
  netdev.kind = kernel.hardware_type == ARPHRD_LOOPBACK ? NicKind::loopback : NicKind::virtual_device;
  netdev.is_infiniband = kernel.hardware_type == ARPHRD_INFINIBAND;
  netdev.is_up = kernel.running.value_or(false);
  netdev.state = netdev.is_up ? "up" : "down";
  return netdev;
}

}  // namespace

const char* to_string(NicKind kind) {
  static constexpr std::array names = {"physical", "virtual_function", "bond",  "vlan",    "bridge",
                                       "virtual",  "wireless",         "ipoib", "loopback"};
  return names.at(static_cast<std::size_t>(kind));
}

std::map<std::string, Netdev> read_netdevs(const Sysfs& sysfs) {
  auto kernel = read_addresses(sysfs);
  // Linux takes any bytes for a name; none that are no text could be chosen, or shown.
  const auto is_text = [](const std::string& name) { return readable(name) == name; };
  std::erase_if(kernel, [&](const auto& one) { return !is_text(one.first); });
  std::map<std::string, Netdev> netdevs;
  for (const auto& name : sysfs.list("class/net")) {
    if (!is_text(name) || !sysfs.is_folder("class/net/" + name)) continue;  // "bonding_masters" is a file
    const auto found = kernel.find(name);
    if (found == kernel.end() && !sysfs.is_recorded()) continue;  // of another network namespace
    netdevs.emplace(name, read_netdev(sysfs, name, found == kernel.end() ? InterfaceAddresses{} : found->second));
  }
  if (!sysfs.is_recorded())
    for (const auto& [name, interface] : kernel)
      if (!netdevs.contains(name)) netdevs.emplace(name, netdev_without_sysfs(name, interface));
  for (const auto& name : find_gateways(sysfs))
    if (const auto found = netdevs.find(name); found != netdevs.end()) found->second.has_gateway = true;
  return netdevs;
}

}  // namespace holmes
