// Choose: which loaded NCCL a profile takes: the cheapest that is correct, which is the stock one where it would list
// the same NICs.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/nic.hpp"
#include "holmes/nccl/image.hpp"
#include "holmes/nccl/net_plugin.hpp"

namespace holmes::nccl {

// Looks a variable up; absent where it is not set.
using Lookup = std::function<std::optional<std::string>(const std::string& name)>;
Lookup process_environment();

struct StockDevices {
  std::vector<std::string> interfaces;  // of net Socket; the first is also where ranks shake hands
  std::vector<std::string> hcas;        // "mlx5_0:1"; empty also where InfiniBand is disabled
};

// What NCCL would list with these variables on a host with these NICs (NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY,
// NCCL_IB_HCA, NCCL_IB_DISABLE).
StockDevices stock_devices(const std::vector<Nic>& nics, const Lookup& environment);

// Variables and files of the site that decide about NICs in the stock NCCL, each with what it does; for the log line.
// `exists`: whether there is such a file.
std::vector<std::string> site_settings(const Lookup& environment,
                                       const std::function<bool(const std::string& path)>& exists);

// The stock library is correct where its NIC lists are exactly the profile's, or the plugin carries the communicator,
// and its environment lets each communicator choose its transport.
struct Judgement {
  bool stock_will_do = false;
  std::string reason;  // why, in words
};
Judgement judge_stock(const Profile& profile, const StockDevices& devices, const Lookup& environment,
                      bool has_config_files);

// The NCCL that a communicator of some profile calls.
struct Chosen {
  const Api* api = nullptr;
  const Image* image = nullptr;       // null: the stock library
  const NetPlugin* plugin = nullptr;  // what carries it; null: what NCCL has itself
  std::string reason;                 // why this one
  std::vector<std::string> notes;     // site settings and warnings, for the log
};

// Checks the profile against this host's NICs (NicError) and, for the plugin, against NCCL and its variables
// (UsageError), then finds or makes what it takes. `package_paths`: as for stock_library. Local, thread-safe.
Chosen choose(const Profile& profile, const std::vector<Nic>& nics, const std::vector<std::string>& package_paths = {});

}  // namespace holmes::nccl
