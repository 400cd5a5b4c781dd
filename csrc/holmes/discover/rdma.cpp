#include "holmes/discover/rdma.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstring>
#include <tuple>

namespace holmes {
namespace {

using Bytes = std::array<unsigned char, 16>;

// The 16 bytes of an IPv6 address or GID; an IPv4 address is mapped (::ffff:a.b.c.d), as RoCE does.
std::optional<Bytes> to_bytes(const std::string& text) {
  Bytes bytes{};
  const std::string mapped = text.find(':') == std::string::npos ? "::ffff:" + text : text;
  return inet_pton(AF_INET6, mapped.c_str(), bytes.data()) == 1 ? std::optional<Bytes>(bytes) : std::nullopt;
}

bool is_ipv4_mapped(const Bytes& bytes) {
  static constexpr unsigned char prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(bytes.data(), prefix, sizeof prefix) == 0;
}

// Files say "IB/RoCE v1" on InfiniBand and RoCE v1 alike.
std::string gid_type(const std::string& text, bool infiniband) {
  return infiniband ? "IB" : text == "RoCE v2" ? "RoCE v2" : "RoCE v1";
}

std::vector<Gid> read_gids(const Sysfs& sysfs, const std::string& folder, bool infiniband) {
  std::vector<Gid> gids;
  for (const auto& entry : sysfs.list(folder + "/gids")) {
    const auto gid = sysfs.read(folder + "/gids/" + entry);
    if (!gid || gid->find_first_not_of("0:") == std::string::npos) continue;  // unused
    Gid used{0, *gid, "", ""};
    std::from_chars(entry.data(), entry.data() + entry.size(), used.index);
    used.type = gid_type(sysfs.read(folder + "/gid_attrs/types/" + entry).value_or(""), infiniband);
    if (!infiniband) used.netdev = sysfs.read(folder + "/gid_attrs/ndevs/" + entry).value_or("");
    gids.push_back(std::move(used));
  }
  std::ranges::sort(gids, {}, &Gid::index);
  return gids;
}

// "4: ACTIVE" -> "active"
std::string port_state(const std::string& text) {
  const auto colon = text.find(": ");
  std::string state = colon == std::string::npos ? text : text.substr(colon + 2);
  std::ranges::transform(state, state.begin(), [](unsigned char c) { return std::tolower(c); });
  return state;
}

// "400 Gb/sec (4X NDR)" -> 400
std::optional<double> port_speed_gbps(const std::string& rate) {
  double value = 0;
  const auto [rest, error] = std::from_chars(rate.data(), rate.data() + rate.size(), value);
  if (error != std::errc() || value <= 0 || !std::string_view(rest).starts_with(" Gb/sec")) return std::nullopt;
  return value;
}

}  // namespace

std::vector<RdmaPort> read_rdma_ports(const Sysfs& sysfs) {
  std::vector<RdmaPort> ports;
  for (const auto& hca : sysfs.list("class/infiniband")) {
    const std::string device = "class/infiniband/" + hca;
    const bool is_channel_adapter = sysfs.read(device + "/node_type").value_or("1: CA").starts_with("1:");
    for (const auto& entry : sysfs.list(device + "/ports")) {
      const std::string folder = device + "/ports/" + entry;
      RdmaPort port;
      port.hca = hca;
      if (std::from_chars(entry.data(), entry.data() + entry.size(), port.port).ec != std::errc()) continue;
      port.device = sysfs.resolve(device + "/device").value_or("");
      port.link_layer = sysfs.read(folder + "/link_layer").value_or("Unspecified");
      port.is_roce = is_channel_adapter && port.link_layer == "Ethernet";
      port.state = port_state(sysfs.read(folder + "/state").value_or("unknown"));
      port.speed_gbps = port_speed_gbps(sysfs.read(folder + "/rate").value_or(""));
      port.gids = read_gids(sysfs, folder, port.link_layer == "InfiniBand");
      ports.push_back(std::move(port));
    }
  }
  std::ranges::sort(
      ports, [](const RdmaPort& a, const RdmaPort& b) { return std::tie(a.hca, a.port) < std::tie(b.hca, b.port); });
  return ports;
}

std::optional<int> choose_gid_index(const RdmaPort& port, const std::string& netdev,
                                    const std::vector<IpAddress>& addresses) {
  if (!port.is_roce) return port.gids.empty() ? std::nullopt : std::optional<int>(port.gids.front().index);
  std::vector<Bytes> own;
  for (const auto& address : addresses)
    if (const auto bytes = to_bytes(address.address)) own.push_back(*bytes);
  std::optional<std::tuple<int, int, int>> best;  // (penalty of the type, penalty of the address, index)
  for (const auto& gid : port.gids) {
    const auto bytes = to_bytes(gid.gid);
    if (!bytes || (!gid.netdev.empty() && gid.netdev != netdev)) continue;
    const bool is_own = std::ranges::find(own, *bytes) != own.end(), mapped = is_ipv4_mapped(*bytes);
    const bool link_local = (*bytes)[0] == 0xfe && (*bytes)[1] == 0x80;
    const int address_penalty = is_own && mapped ? 0 : is_own && !link_local ? 1 : mapped ? 2 : link_local ? 4 : 3;
    const std::tuple candidate(gid.type == "RoCE v2" ? 0 : 1, address_penalty, gid.index);
    if (!best || candidate < *best) best = candidate;
  }
  return best ? std::optional<int>(std::get<2>(*best)) : std::nullopt;
}

}  // namespace holmes
