// Addresses of the interfaces: from the running kernel, or from the file `addresses` of a recorded machine.
#pragma once

#include <array>
#include <compare>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/sysfs.hpp"

namespace holmes {

// A numeric IPv4 or IPv6 address and the length of its network's prefix.
struct IpAddress {
  std::string address;
  int prefix_length = 0;

  bool is_ipv4() const { return address.find(':') == std::string::npos; }
  bool operator==(const IpAddress&) const = default;
};

// Valid on one link only: fe80::/10, 169.254.0.0/16.
bool is_link_local(const std::string& address);

// A subnet. IPv4 sorts before IPv6, then by number, then the larger one first.
struct IpNetwork {
  bool is_ipv6 = false;
  std::array<unsigned char, 16> bytes{};  // IPv4: the first four
  int prefix_length = 0;

  auto operator<=>(const IpNetwork&) const = default;
  std::string text() const;  // "10.0.0.0/24"
};
IpNetwork network_of(const IpAddress& address);

// What the kernel says about an interface beside sysfs.
struct InterfaceAddresses {
  std::vector<IpAddress> addresses;  // IPv4 first, then IPv6, link-local last
  std::optional<bool> running;       // up and with a carrier; absent for a recorded machine
  std::optional<int> hardware_type;  // ARPHRD_*; absent for a recorded machine
};

// By interface name. Of a recorded machine, interfaces without an address are missing; of the running kernel, none is.
// A recorded machine's file has one "eth0 10.0.0.1/24" a line; throws UsageError naming a line that is not so.
std::map<std::string, InterfaceAddresses> read_addresses(const Sysfs& sysfs);

}  // namespace holmes
