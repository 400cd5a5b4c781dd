// Choose: which loaded NCCL a profile takes: the cheapest that is correct.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "holmes/nccl/image.hpp"
#include "holmes/nccl/stock_devices.hpp"

namespace holmes::nccl {

// The stock library is correct where its NIC lists are exactly the profile's and its environment lets each communicator
// choose its transport. `site`: as site_settings gives it for what an NCCL configuration file or plugin may change.
struct Judgement {
  bool stock_will_do = false;
  std::string reason;  // why, in words
};
Judgement judge_stock(const Profile& profile, const StockDevices& devices, const Lookup& environment,
                      bool has_config_files);

// The NCCL that a communicator of some profile calls.
struct Chosen {
  const Api* api = nullptr;
  const Image* image = nullptr;    // null: the stock library
  std::string reason;              // why this one
  std::vector<std::string> notes;  // site settings and warnings, for the log
};

// Checks the profile against this host's NICs (NicError), then finds or makes what it takes. `package_paths`: as for
// stock_library. Local, thread-safe.
Chosen choose(const Profile& profile, const std::vector<Nic>& nics, const std::vector<std::string>& package_paths = {});

}  // namespace holmes::nccl
