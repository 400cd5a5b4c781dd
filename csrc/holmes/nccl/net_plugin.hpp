// NetPlugin: Holmes as the network plugin of the NCCLs in this process, for communicators of ours that are to go over
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "holmes/nccl/abi.hpp"
#include "holmes/nccl/profile.hpp"

namespace holmes::nccl {

// The first NCCL that tells a plugin which communicator it serves.
inline constexpr int first_version_with_plugin = 22800;

// What NCCL makes of a communicator's unique id, and calls commHash, commId or the communicator's hash.
std::uint64_t hash_of(const UniqueId& id);

// The loaded library, of which a process has one. Thread-safe.
class NetPlugin {
public:
  // Loads it, unless it is loaded, from beside the engine's library. Throws UsageError where it is not there or comes
  // from another version of Holmes.
  static const NetPlugin& get();

  const std::string& path() const { return path_; }
  // Whether NCCL finds this very library by what NCCL_NET_PLUGIN says (since 2.27 a list).
  bool is_named_by(const std::string& variable) const;
  // Throws UsageError where a communicator with this profile cannot go over it on this host.
  void check(const Profile& profile) const;

  // As long as it lives, a communicator with this id gets the NICs of these interfaces.
  class Assignment {
  public:
    // Throws UsageError where another rank of this process has said others for the same communicator.
    Assignment(const NetPlugin& plugin, const UniqueId& id, const std::vector<std::string>& interfaces);
    ~Assignment();
    Assignment(const Assignment&) = delete;
    Assignment& operator=(const Assignment&) = delete;

    // Whether the plugin has served the communicator with them.
    bool was_heeded() const;

  private:
    const NetPlugin& plugin_;
    const std::uint64_t comm_id_;
  };

private:
  explicit NetPlugin(void* handle);

  std::string path_;
  int (*assign_)(std::uint64_t comm_id, const char* nics) = nullptr;
  int (*uses_)(std::uint64_t comm_id) = nullptr;
  int (*check_)(const char* nics, char* problem, std::size_t bytes) = nullptr;
};

}  // namespace holmes::nccl
