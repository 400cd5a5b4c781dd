#include "holmes/nccl/choose.hpp"

#include <algorithm>
#include <filesystem>

namespace holmes::nccl {
namespace {

bool file_exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::string list_text(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

bool same_names(std::vector<std::string> a, std::vector<std::string> b) {
  std::ranges::sort(a);
  std::ranges::sort(b);
  return a == b;
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
  if (const auto setting = first_set(environment, {"NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE"}))
    return {false, *setting + " rules the stock NCCL"};
  if (fixed) return {false, *fixed + " rules the stock NCCL"};
  // Handshakes of all transports go over these.
  if (!same_names(devices.interfaces, profile.interfaces))
    return {false, "the stock NCCL lists the interfaces " + list_text(devices.interfaces) + ", not " +
                       list_text(profile.interfaces)};
  if (profile.net == Net::socket)
    return {true, "the stock NCCL lists just these interfaces; the transport is chosen for each communicator"};
  if (!same_names(devices.hcas, profile.hcas))
    return {false,
            "the stock NCCL lists the HCA ports " + list_text(devices.hcas) + ", not " + list_text(profile.hcas)};
  const auto gid_index = environment("NCCL_IB_GID_INDEX");
  if (profile.gid_index && gid_index != std::to_string(*profile.gid_index))
    return {false, "the GID index " + std::to_string(*profile.gid_index) + " is not the stock NCCL's"};
  return {true, "the stock NCCL lists just these HCA ports; the transport is chosen for each communicator"};
}

Chosen choose(const Profile& profile, const std::vector<Nic>& nics, const std::vector<std::string>& package_paths) {
  check_profile(profile, nics);
  const Library& library = stock_library(package_paths);
  const Lookup environment = process_environment();
  const auto home = environment("HOME");
  const bool has_config_files = file_exists("/etc/nccl.conf") || (home && file_exists(*home + "/.nccl.conf"));
  const Judgement stock = judge_stock(profile, stock_devices(nics, environment), environment, has_config_files);

  Chosen chosen;
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
