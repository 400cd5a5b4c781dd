// Profile: what one NCCL communicator may use of this host's NICs, and the variables that tell NCCL so.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/nic.hpp"

namespace holmes::nccl {

// NCCL's built-in transports, by the names that its configuration knows; or what the site has installed and set
// (EFA, GCP's, SHARP): then NCCL chooses as it would without Holmes; or Holmes as NCCL's network plugin
// (net_plugin.hpp).
enum class Net { ib, socket, site, plugin };
const char* net_name(Net net);  // "IB" (RoCE too), "Socket", "Site" or "holmes"
// Throws UsageError for another name.
Net net_from_name(const std::string& name);

struct Profile {
  Net net = Net::socket;
  std::vector<std::string> hcas{};        // "mlx5_0:1"; of net IB only
  std::vector<std::string> interfaces{};  // net Socket, holmes: those that carry data; IB: where the ranks shake
                                          // hands; Site: only information
  std::optional<int> gid_index{};         // RoCE; absent: NCCL's automatic choice
  std::string host_id{};                  // makes NCCL take ranks of one host for ranks of several (tests)
  std::map<std::string, std::string> variables{};  // further ones for this image ("NCCL_SOCKET_NTHREADS")

  // Equal for profiles that can share an image.
  std::string key() const;
  // "IB over mlx5_0:1, handshake on eth0"
  std::string text() const;
};

// By name; an absent value hides the variable.
using Variables = std::map<std::string, std::optional<std::string>, std::less<>>;
// What an image of this profile sees in place of the process's environment.
Variables image_variables(const Profile& profile);

// Throws NicError naming the NIC, the rule and the fix, before NCCL sees a name that it cannot use: a wrong one would
// spoil an image for good. Rules: each interface exists, carries packets and has an address; each HCA port exists and
// is active; one link layer; as many as NCCL can hold. `nics`: of this host.
void check_profile(const Profile& profile, const std::vector<Nic>& nics);

// What may lead traffic over another NIC than the profile says, in sentences: NCCL's sender does not bind, the kernel's
// routes choose its NIC.
std::vector<std::string> profile_warnings(const Profile& profile, const std::vector<Nic>& nics);

}  // namespace holmes::nccl
