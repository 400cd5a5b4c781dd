#include "holmes/discover/addresses.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/if_packet.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <memory>
#include <sstream>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// IPv4, then global IPv6, then link-local.
void sort_addresses(std::vector<IpAddress>& addresses) {
  const auto order = [](const IpAddress& a) { return is_link_local(a.address) ? 2 : a.is_ipv4() ? 0 : 1; };
  std::stable_sort(addresses.begin(), addresses.end(),
                   [&](const IpAddress& a, const IpAddress& b) { return order(a) < order(b); });
}

IpAddress parse_address(const std::string& text, int line) {
  const auto slash = text.find('/');
  IpAddress result{text.substr(0, slash), -1};
  unsigned char bytes[16];
  const int family = result.is_ipv4() ? AF_INET : AF_INET6;
  if (slash != std::string::npos)
    std::from_chars(text.data() + slash + 1, text.data() + text.size(), result.prefix_length);
  if (inet_pton(family, result.address.c_str(), bytes) != 1 || result.prefix_length < 0 ||
      result.prefix_length > (result.is_ipv4() ? 32 : 128))
    throw UsageError("line " + std::to_string(line) + " of the sysfs root's file 'addresses' has '" + text +
                     "': write an address with its prefix length, as in 'eth0 10.0.0.1/24'");
  return result;
}

std::map<std::string, InterfaceAddresses> read_recorded(const Sysfs& sysfs) {
  std::map<std::string, InterfaceAddresses> result;
  std::istringstream lines(sysfs.read("addresses").value_or(""));
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::istringstream words(line);
    std::string name, address;
    if (!(words >> name) || name.front() == '#') continue;
    words >> address;
    result[name].addresses.push_back(parse_address(address, number));
  }
  return result;
}

template <class SocketAddress>
const SocketAddress& as(const sockaddr* address) {
  return *reinterpret_cast<const SocketAddress*>(address);
}

template <class Bytes>
int count_ones(const Bytes& bytes) {
  int ones = 0;
  for (const unsigned char* byte = reinterpret_cast<const unsigned char*>(&bytes);
       byte != reinterpret_cast<const unsigned char*>(&bytes + 1); ++byte)
    ones += std::popcount(*byte);
  return ones;
}

std::map<std::string, InterfaceAddresses> read_kernel() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0)
    throw SystemError("cannot list the network interfaces: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, freeifaddrs);
  std::map<std::string, InterfaceAddresses> result;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    auto& found = result[entry->ifa_name];
    constexpr unsigned lower_up = 1U << 16;  // IFF_LOWER_UP, which only <linux/if.h> names: IFF_RUNNING comes later
    found.running = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & (IFF_RUNNING | lower_up)) != 0;
    if (entry->ifa_addr == nullptr) continue;
    char text[INET6_ADDRSTRLEN];
    switch (entry->ifa_addr->sa_family) {
      case AF_PACKET:
        found.hardware_type = as<sockaddr_ll>(entry->ifa_addr).sll_hatype;
        break;
      case AF_INET:
        inet_ntop(AF_INET, &as<sockaddr_in>(entry->ifa_addr).sin_addr, text, sizeof text);
        found.addresses.push_back({text, count_ones(as<sockaddr_in>(entry->ifa_netmask).sin_addr)});
        break;
      case AF_INET6:
        inet_ntop(AF_INET6, &as<sockaddr_in6>(entry->ifa_addr).sin6_addr, text, sizeof text);
        found.addresses.push_back({text, count_ones(as<sockaddr_in6>(entry->ifa_netmask).sin6_addr)});
        break;
    }
  }
  return result;
}

}  // namespace

bool is_link_local(const std::string& address) {
  return address.starts_with("fe80:") || address.starts_with("169.254.");
}

IpNetwork network_of(const IpAddress& address) {
  IpNetwork network{!address.is_ipv4(), {}, address.prefix_length};
  inet_pton(address.is_ipv4() ? AF_INET : AF_INET6, address.address.c_str(), network.bytes.data());
  for (int bit = address.prefix_length; bit < 128; ++bit)
    network.bytes[static_cast<std::size_t>(bit / 8)] &= static_cast<unsigned char>(~(0x80 >> (bit % 8)));
  return network;
}

std::string IpNetwork::text() const {
  char text[INET6_ADDRSTRLEN];
  inet_ntop(is_ipv6 ? AF_INET6 : AF_INET, bytes.data(), text, sizeof text);
  return std::string(text) + "/" + std::to_string(prefix_length);
}

std::map<std::string, InterfaceAddresses> read_addresses(const Sysfs& sysfs) {
  auto result = sysfs.is_recorded() ? read_recorded(sysfs) : read_kernel();
  for (auto& [name, interface] : result) sort_addresses(interface.addresses);
  return result;
}

}  // namespace holmes
