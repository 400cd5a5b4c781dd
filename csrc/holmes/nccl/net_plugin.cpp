#include "holmes/nccl/net_plugin.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"
#include "holmes/nccl/api.hpp"

namespace holmes::nccl {
namespace {

constexpr const char* file_name = "libnccl-net-holmes.so";  // also its soname, by which NCCL's loader finds it

// The folder of the library that this function is in.
std::filesystem::path own_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return {};
  return std::filesystem::path(info.dli_fname).parent_path();
}

// As HOLMES_NICS says it: all of them together.
std::string selection_of(const std::vector<std::string>& interfaces) {
  return joined(interfaces, ",") + ",rails:" + std::to_string(interfaces.size());
}

// What ranks of this process have assigned: those of one communicator have one id.
struct Assigned {
  std::string nics;
  int holders = 0;
};
std::mutex assigned_mutex;
std::map<std::uint64_t, Assigned>& all_assigned() {
  static auto* const all = new std::map<std::uint64_t, Assigned>();  // never destroyed: NCCL's threads outlive statics
  return *all;
}

}  // namespace

std::uint64_t hash_of(const UniqueId& id) {
  std::uint64_t a = 1 ^ sizeof(id.internal), b = 1;
  for (std::size_t at = 0; at < sizeof(id.internal); at += sizeof(std::uint64_t)) {
    a += b;
    b ^= a;
    a ^= a >> 31;
    a *= 0x9de62bbc8cef3ce3;
    b ^= b >> 32;
    b *= 0x485cd6311b599e79;
    std::uint64_t word = 0;
    std::memcpy(&word, id.internal + at, sizeof(word));
    a += word;
  }
  a ^= a >> 31;
  a *= 0xbac3bd562846de6b;
  a += b;
  a ^= a >> 32;
  return a * 0x995a187a14e7b445;
}

const NetPlugin& NetPlugin::get() {
  static std::mutex mutex;
  static const NetPlugin* plugin = nullptr;  // never destroyed, as what it loaded
  std::lock_guard lock(mutex);
  if (plugin != nullptr) return *plugin;
  void* handle = ::dlopen(file_name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  const auto beside = own_folder() / file_name;
  if (handle == nullptr) handle = ::dlopen(beside.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    throw UsageError("NCCL's network plugin of Holmes cannot be loaded: " + std::string(reason ? reason : "") +
                     "; install Holmes whole, or leave net='holmes' (HOLMES_NCCL_NET) out");
  }
  return *(plugin = new NetPlugin(handle));
}

NetPlugin::NetPlugin(void* handle) : path_(path_of(handle)) {
  const bool has_all = resolve(handle, "holmes_nccl_net_assign", assign_) &&
                       resolve(handle, "holmes_nccl_net_uses", uses_) &&
                       resolve(handle, "holmes_nccl_net_check", check_);
  if (!has_all)
    throw UsageError("NCCL's network plugin in this process, " + path_ +
                     ", is of another version of Holmes; let LD_LIBRARY_PATH name this one's folder, " +
                     own_folder().string() + ", or none");
}

bool NetPlugin::is_named_by(const std::string& variable) const {
  for (std::size_t begin = 0; begin <= variable.size();) {
    const std::size_t end = std::min(variable.find(',', begin), variable.size());
    const std::string entry = variable.substr(begin, end - begin);
    std::error_code error;
    if (entry == "holmes" || entry == file_name) return true;
    if (entry.find('/') != std::string::npos && std::filesystem::equivalent(entry, path_, error)) return true;
    begin = end + 1;
  }
  return false;
}

void NetPlugin::check(const Profile& profile) const {
  for (const char* variable : {"NCCL_NET", "NCCL_NET_PLUGIN"})
    if (profile.variables.contains(variable))
      throw UsageError("nccl_variables has " + std::string(variable) +
                       ", which net='holmes' (HOLMES_NCCL_NET) decides; leave one of the two out");
  std::array<char, 4096> problem{};
  if (check_(selection_of(profile.interfaces).c_str(), problem.data(), problem.size()) != success)
    throw UsageError("NCCL's network plugin of Holmes cannot carry the communicator: " + std::string(problem.data()));
}

NetPlugin::Assignment::Assignment(const NetPlugin& plugin, const UniqueId& id,
                                  const std::vector<std::string>& interfaces)
    : plugin_(plugin), comm_id_(hash_of(id)) {
  const std::string nics = selection_of(interfaces);
  std::lock_guard lock(assigned_mutex);
  Assigned& assigned = all_assigned()[comm_id_];
  if (assigned.holders > 0 && assigned.nics != nics)
    throw UsageError("two ranks of one process cannot have different NICs in one communicator over NCCL's network " +
                     std::string("plugin: ") + assigned.nics + " and " + nics + "; run them in two processes");
  if (assigned.holders == 0 && plugin_.assign_(comm_id_, nics.c_str()) != success) {
    all_assigned().erase(comm_id_);
    throw UsageError("NCCL's network plugin of Holmes takes no NICs '" + nics + "'");
  }
  assigned.nics = nics;
  ++assigned.holders;
}

NetPlugin::Assignment::~Assignment() {
  std::lock_guard lock(assigned_mutex);
  const auto found = all_assigned().find(comm_id_);
  if (--found->second.holders > 0) return;
  all_assigned().erase(found);
  plugin_.assign_(comm_id_, "");
}

bool NetPlugin::Assignment::was_heeded() const { return plugin_.uses_(comm_id_) > 0; }

}  // namespace holmes::nccl
