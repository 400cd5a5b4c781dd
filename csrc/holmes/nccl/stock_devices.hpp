// StockDevices: which NICs the stock NCCL lists in this process, from its environment: its rules, applied by us.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "holmes/discover/nic.hpp"

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

}  // namespace holmes::nccl
