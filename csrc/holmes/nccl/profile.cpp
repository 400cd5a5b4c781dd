#include "holmes/nccl/profile.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes::nccl {
namespace {

constexpr std::size_t max_interfaces = 16;  // NCCL's MAX_IFS
constexpr std::size_t max_hcas = 32;        // NCCL's MAX_IB_DEVS

const Nic* by_interface(const std::vector<Nic>& nics, const std::string& interface) {
  const auto found = std::ranges::find_if(nics, [&](const Nic& nic) { return nic.netdev == interface; });
  return found == nics.end() ? nullptr : &*found;
}

const Nic* by_port(const std::vector<Nic>& nics, const std::string& port) {
  const auto found = std::ranges::find_if(nics, [&](const Nic& nic) { return nic.port_name() == port; });
  return found == nics.end() ? nullptr : &*found;
}

bool has_global_address(const Nic& nic) {
  return std::ranges::any_of(nic.addresses, [](const IpAddress& a) { return !is_link_local(a.address); });
}

[[noreturn]] void refuse(const std::string& nic, const std::string& problem, const std::vector<Nic>& nics) {
  const std::string has = joined(nics, ", ", [](const Nic& one) { return one.name + " (" + one.state + ")"; });
  throw NicError(problem + ". This host has: " + (has.empty() ? "no NIC at all" : has) +
                     ". Fix: choose one that is up (`holmes nics` lists them)",
                 {.host = host_name(), .nic = nic});
}

bool share_network(const Nic& a, const Nic& b) {
  for (const IpAddress& one : a.addresses)
    for (const IpAddress& other : b.addresses)
      if (!is_link_local(one.address) && network_of(one) == network_of(other)) return true;
  return false;
}

}  // namespace

const char* net_name(Net net) {
  constexpr const char* names[] = {"IB", "Socket", "Site", "holmes"};
  return names[static_cast<std::size_t>(net)];
}

Net net_from_name(const std::string& name) {
  for (const Net net : {Net::ib, Net::socket, Net::site, Net::plugin})
    if (name == net_name(net)) return net;
  throw UsageError("NCCL transport '" + name +
                   "' does not exist; use 'IB' (also for RoCE), 'Socket', 'Site' or 'holmes'");
}

std::string Profile::key() const {
  std::string key = std::string(net_name(net)) + "|" + joined(hcas, ",") + "|" + joined(interfaces, ",") + "|" +
                    (gid_index ? std::to_string(*gid_index) : "") + "|" + host_id;
  for (const auto& [name, value] : variables) key += "|" + name + "=" + value;
  return key;
}

std::string Profile::text() const {
  if (net == Net::socket) return "Socket over " + joined(interfaces);
  if (net == Net::site) return "the site's transport";
  if (net == Net::plugin) return "Holmes as NCCL's plugin over " + joined(interfaces);
  return "IB over " + joined(hcas) + (gid_index ? " (GID " + std::to_string(*gid_index) + ")" : "") +
         ", handshake on " + joined(interfaces);
}

Variables image_variables(const Profile& profile) {
  Variables variables;
  if (!profile.host_id.empty()) variables["NCCL_HOSTID"] = profile.host_id;
  // Blocking calls come from each communicator's configuration, which this would override.
  variables["NCCL_COMM_BLOCKING"] = std::nullopt;
  // A fixed rendezvous for all communicators would override their unique ids.
  variables["NCCL_COMM_ID"] = std::nullopt;
  // It would answer before this table.
  variables["NCCL_ENV_PLUGIN"] = "none";
  for (const auto& [name, value] : profile.variables) variables[name] = value;
  if (profile.net == Net::site) return variables;
  const auto set = [&](const char* name, std::optional<std::string> value) {
    variables.try_emplace(name, std::move(value));
  };
  // "=": exactly these names, where NCCL would take them for prefixes.
  const auto exactly = [](const std::vector<std::string>& names) {
    return std::string("=").append(joined(names, ","));
  };
  set("NCCL_SOCKET_IFNAME", exactly(profile.interfaces));
  set("NCCL_IB_DISABLE", profile.net == Net::ib ? "0" : "1");
  set("NCCL_IB_HCA", profile.net == Net::ib ? std::optional(exactly(profile.hcas)) : std::nullopt);
  if (profile.gid_index) set("NCCL_IB_GID_INDEX", std::to_string(*profile.gid_index));
  // The transport comes from each communicator's configuration, which this would override.
  set("NCCL_NET", std::nullopt);
  set("NCCL_OOB_NET_IFNAME", std::nullopt);
  // A plugin of the site would bring NICs of its own.
  set("NCCL_NET_PLUGIN", profile.net == Net::plugin ? "holmes" : "none");
  // Each image opens its file anew and would empty another's.
  if (const char* file = std::getenv("NCCL_DEBUG_FILE"); file != nullptr && *file != '\0')
    set("NCCL_DEBUG_FILE", std::string(file) + "." + net_name(profile.net) + "-" +
                               joined(profile.net == Net::ib ? profile.hcas : profile.interfaces, "-"));
  return variables;
}

void check_profile(const Profile& profile, const std::vector<Nic>& nics) {
  if (profile.net == Net::site) return;
  const auto limit = [&](const std::vector<std::string>& names, std::size_t most, const char* what) {
    if (names.size() > most)
      throw NicError(std::to_string(names.size()) + " " + what + " are more than NCCL can hold (" +
                         std::to_string(most) + "); choose fewer",
                     {.host = host_name(), .nic = names.front()});
  };
  limit(profile.interfaces, max_interfaces, "interfaces");
  limit(profile.hcas, max_hcas, "HCA ports");
  if (profile.interfaces.empty())
    refuse("", "NCCL needs a network interface with an address, also to set up InfiniBand and RoCE connections", nics);
  for (const std::string& name : profile.interfaces) {
    const Nic* nic = by_interface(nics, name);
    if (nic == nullptr) refuse(name, "there is no network interface '" + name + "'", nics);
    if (name.find_first_of(",:") != std::string::npos)
      refuse(name, "NCCL cannot be told of an interface whose name has a comma or a colon, as '" + name + "'", nics);
    if (!nic->is_netdev_up)
      refuse(name,
             "the interface '" + name + "' is down (check its cable, bring it up with `ip link set " + name + " up`)",
             nics);
    if (!has_global_address(*nic))
      refuse(name, "the interface '" + name + "' has no address (`ip address add ... dev " + name + "`)", nics);
  }
  if (profile.net != Net::ib) return;
  if (profile.hcas.empty()) refuse("", "InfiniBand or RoCE was asked for, but no HCA port chosen", nics);
  std::string link_layer;
  std::string first;
  for (const std::string& name : profile.hcas) {
    const Nic* nic = by_port(nics, name);
    if (nic == nullptr) refuse(name, "there is no HCA port '" + name + "'", nics);
    if (!nic->is_up) refuse(name, "the port '" + name + "' is not active but " + nic->state, nics);
    if (first.empty()) link_layer = nic->link_layer, first = name;
    if (nic->link_layer != link_layer)
      refuse(name,
             first + " is " + link_layer + " and " + name + " is " + nic->link_layer +
                 ": ports of two link layers cannot talk to each other; choose one class",
             nics);
  }
}

std::vector<std::string> profile_warnings(const Profile& profile, const std::vector<Nic>& nics) {
  std::vector<std::string> warnings;
  if (profile.net != Net::socket) return warnings;
  for (const std::string& name : profile.interfaces) {
    const Nic* chosen = by_interface(nics, name);
    for (const Nic& other : nics) {
      const bool is_other = chosen != nullptr && !other.netdev.empty() && other.netdev != name && other.is_netdev_up &&
                            other.nic_class != NicClass::loopback;
      if (is_other && share_network(*chosen, other))
        warnings.push_back(name + " and " + other.netdev +
                           " are in one subnet: NCCL does not bind the sending side, so " +
                           "the kernel's routes may send over " + other.netdev +
                           "; give each NIC a subnet of its own, or a source-based route");
    }
  }
  return warnings;
}

}  // namespace holmes::nccl
