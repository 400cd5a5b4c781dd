#include "holmes/nccl/choose.hpp"

#include <strings.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes::nccl {
namespace {

// NCCL's list syntax: "[^][=]name[:port],...". Without "=" the names are prefixes; "^" turns the meaning round.
class NameList {
public:
  explicit NameList(std::string text) {
    if (text.starts_with("^")) is_excluding_ = true, text.erase(0, 1);
    if (text.starts_with("=")) is_exact_ = true, text.erase(0, 1);
    for (std::size_t begin = 0; begin <= text.size();) {
      const std::size_t end = std::min(text.find(',', begin), text.size());
      const std::string entry = text.substr(begin, end - begin);
      const std::size_t colon = entry.find(':');
      if (!entry.empty())
        entries_.push_back({entry.substr(0, colon), colon == std::string::npos ? "" : entry.substr(colon + 1)});
      begin = end + 1;
    }
  }

  bool admits(const std::string& name, const std::string& port = "") const {
    const bool is_named = std::ranges::any_of(entries_, [&](const Entry& entry) {
      const bool fits = is_exact_ ? name == entry.name : name.starts_with(entry.name);
      // Behind a port there may be a rail and a plane.
      return fits && (port.empty() || entry.port.empty() || entry.port.substr(0, entry.port.find(':')) == port);
    });
    return is_named != is_excluding_;
  }

private:
  struct Entry {
    std::string name;
    std::string port;
  };
  std::vector<Entry> entries_;
  bool is_exact_ = false;
  bool is_excluding_ = false;
};

bool has_family(const Nic& nic, const std::optional<std::string>& family) {
  return std::ranges::any_of(nic.addresses, [&](const IpAddress& address) {
    return family == "AF_INET" ? address.is_ipv4() : family == "AF_INET6" ? !address.is_ipv4() : true;
  });
}

// More than one character: NCCL takes a shorter value for none.
std::optional<std::string> list_of(const Lookup& environment, const std::string& variable) {
  const auto value = environment(variable);
  return value && value->size() > 1 ? value : std::nullopt;
}

std::vector<std::string> stock_interfaces(const std::vector<Nic>& nics, const Lookup& environment) {
  const auto family = environment("NCCL_SOCKET_FAMILY");
  const auto listed = [&](const NameList& list) {
    std::vector<std::string> names;
    for (const Nic& nic : nics) {
      const bool is_known = std::ranges::find(names, nic.netdev) != names.end();
      if (!nic.netdev.empty() && !is_known && nic.is_netdev_up && has_family(nic, family) && list.admits(nic.netdev))
        names.push_back(nic.netdev);
    }
    return names;
  };
  if (const auto value = list_of(environment, "NCCL_SOCKET_IFNAME")) return listed(NameList(*value));
  for (const char* value : {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"})
    if (auto names = listed(NameList(value)); !names.empty()) return names;
  return {};
}

}  // namespace

Lookup process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

StockDevices stock_devices(const std::vector<Nic>& nics, const Lookup& environment) {
  StockDevices devices{stock_interfaces(nics, environment), {}};
  const auto disabled = environment("NCCL_IB_DISABLE");
  if (disabled && std::strtoll(disabled->c_str(), nullptr, 0) != 0) return devices;
  const auto value = list_of(environment, "NCCL_IB_HCA");
  const std::optional<NameList> list = value ? std::optional<NameList>(*value) : std::nullopt;
  for (const Nic& nic : nics) {
    if (nic.hca.empty() || !nic.is_up || nic.kind == NicKind::vlan) continue;
    const bool is_known = std::ranges::find(devices.hcas, nic.port_name()) != devices.hcas.end();
    if (!is_known && (!list || list->admits(nic.hca, std::to_string(nic.port.value_or(1)))))
      devices.hcas.push_back(nic.port_name());
  }
  return devices;
}

std::vector<std::string> site_settings(const Lookup& environment,
                                       const std::function<bool(const std::string& path)>& exists) {
  std::vector<std::string> found;
  const auto note = [&](const char* variable, const char* effect) {
    if (const auto value = environment(variable); value && !value->empty())
      found.push_back(std::string(variable) + "=" + *value + " " + effect);
  };
  note("NCCL_NET", "chooses the transport of every communicator of the stock NCCL");
  note("NCCL_NET_PLUGIN", "brings another transport into the stock NCCL");
  note("NCCL_IB_DISABLE", "decides about InfiniBand and RoCE in the stock NCCL");
  note("NCCL_IB_HCA", "chooses the HCAs of the stock NCCL");
  note("NCCL_IB_GID_INDEX", "chooses the GID of every RoCE connection that has none of its own");
  note("NCCL_SOCKET_IFNAME", "chooses the interfaces of the stock NCCL");
  note("NCCL_SOCKET_FAMILY", "chooses the kind of addresses");
  note("NCCL_COMM_ID", "fixes the rendezvous of every communicator of the stock NCCL");
  note("NCCL_COMM_BLOCKING", "makes the stock NCCL's calls block or not");
  note("NCCL_ENV_PLUGIN", "answers in place of the environment in the stock NCCL");
  note("NCCL_CONF_FILE", "names a file with further settings");
  if (exists("/etc/nccl.conf")) found.emplace_back("/etc/nccl.conf has further settings");
  const auto home = environment("HOME");
  if (home && exists(*home + "/.nccl.conf")) found.push_back(*home + "/.nccl.conf has further settings");
  return found;
}

namespace {

bool file_exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

bool same_names(std::vector<std::string> a, std::vector<std::string> b) {
  std::ranges::sort(a);
  std::ranges::sort(b);
  return a == b;
}

// As NCCL compares names of transports.
bool is_word(const std::optional<std::string>& value, const char* word) {
  return value && ::strcasecmp(value->c_str(), word) == 0;
}

// The first of these variables that is set to something.
std::optional<std::string> first_set(const Lookup& environment, std::initializer_list<const char*> variables) {
  for (const char* variable : variables)
    if (const auto value = environment(variable); value && !value->empty()) return std::string(variable) + "=" + *value;
  return std::nullopt;
}

}  // namespace

Judgement judge_stock(const Profile& profile, const StockDevices& devices, const Lookup& environment,
                      bool has_config_files) {
  if (!profile.host_id.empty() || !profile.variables.empty()) return {false, "the profile has variables of its own"};
  const auto fixed = first_set(environment, {"NCCL_ENV_PLUGIN", "NCCL_COMM_ID", "NCCL_COMM_BLOCKING"});
  if (profile.net == Net::site) {
    if (fixed) return {false, *fixed + " rules the stock NCCL"};
    return {true, "no NICs are asked for, and the site has a transport of its own"};
  }
  if (has_config_files) return {false, "an NCCL configuration file may change the stock NCCL's NICs"};
  const bool is_plugin = profile.net == Net::plugin;
  std::optional<std::string> setting;
  if (!is_plugin)
    setting = first_set(environment, {"NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE"});
  else if (is_word(environment("NCCL_NET"), net_name(Net::plugin)))
    setting = first_set(environment, {"NCCL_CONF_FILE"});
  else
    setting = first_set(environment, {"NCCL_NET", "NCCL_CONF_FILE"});
  if (setting) return {false, *setting + " rules the stock NCCL"};
  if (fixed) return {false, *fixed + " rules the stock NCCL"};
  if (is_plugin && devices.interfaces.empty()) return {false, "the stock NCCL finds no interface for its handshakes"};
  if (is_plugin)
    return {true, "it is told the NICs of each communicator; NCCL's handshakes go over " + devices.interfaces.front()};
  // Handshakes of all transports go over these.
  if (!same_names(devices.interfaces, profile.interfaces))
    return {false, "the stock NCCL lists the interfaces " + or_none(devices.interfaces) + ", not " +
                       or_none(profile.interfaces)};
  if (profile.net == Net::socket)
    return {true, "the stock NCCL lists just these interfaces; the transport is chosen for each communicator"};
  if (!same_names(devices.hcas, profile.hcas))
    return {false, "the stock NCCL lists the HCA ports " + or_none(devices.hcas) + ", not " + or_none(profile.hcas)};
  const auto gid_index = environment("NCCL_IB_GID_INDEX");
  if (profile.gid_index && gid_index != std::to_string(*profile.gid_index))
    return {false, "the GID index " + std::to_string(*profile.gid_index) + " is not the stock NCCL's"};
  return {true, "the stock NCCL lists just these HCA ports; the transport is chosen for each communicator"};
}

namespace {

void check_version_for_plugin(int version) {
  if (version >= first_version_with_plugin) return;
  throw UsageError("NCCL " + version_text(version) + " does not tell a network plugin which communicator it serves, " +
                   "so that net='holmes' (HOLMES_NCCL_NET) cannot give this one its NICs; use NCCL " +
                   version_text(first_version_with_plugin) + " or later, or leave it out: groups get images then");
}

void check_named(const NetPlugin& plugin, const std::optional<std::string>& variable) {
  if (variable && plugin.is_named_by(*variable)) return;
  const bool is_set = variable && !variable->empty();
  throw UsageError((is_set ? "NCCL_NET_PLUGIN=" + *variable + " does not name" : "NCCL_NET_PLUGIN is not set to") +
                   " the plugin that net='holmes' (HOLMES_NCCL_NET) needs, " + plugin.path() +
                   "; export NCCL_NET_PLUGIN=" + (is_set && !is_word(variable, "none") ? *variable + "," : "") +
                   "holmes before the process starts: NCCL reads it once");
}

}  // namespace

Chosen choose(const Profile& profile, const std::vector<Nic>& nics, const std::vector<std::string>& package_paths) {
  check_profile(profile, nics);
  const Library& library = stock_library(package_paths);
  const Lookup environment = process_environment();
  const auto home = environment("HOME");
  const bool has_config_files = file_exists("/etc/nccl.conf") || (home && file_exists(*home + "/.nccl.conf"));
  const Judgement stock = judge_stock(profile, stock_devices(nics, environment), environment, has_config_files);

  Chosen chosen;
  if (profile.net == Net::plugin) {
    check_version_for_plugin(library.api.version);
    chosen.plugin = &NetPlugin::get();
    chosen.plugin->check(profile);
    if (stock.stock_will_do) check_named(*chosen.plugin, environment("NCCL_NET_PLUGIN"));
  }
  chosen.reason = stock.reason;
  chosen.notes = site_settings(environment, file_exists);
  for (std::string& warning : profile_warnings(profile, nics)) chosen.notes.push_back(std::move(warning));
  if (stock.stock_will_do) {
    chosen.api = &library.api;
    return chosen;
  }
  chosen.image = &image_for(profile, library);
  chosen.api = &chosen.image->api();
  return chosen;
}

}  // namespace holmes::nccl
