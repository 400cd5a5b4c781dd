// NIC bindings as Python gives them: (interface, address) pairs. Shared by both modules (_C and _c10d).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "holmes/core/options.hpp"

namespace holmes {

using NicPairs = std::vector<std::pair<std::string, std::string>>;

inline std::vector<NicBinding> to_bindings(const NicPairs& nics) {
  std::vector<NicBinding> bindings;
  for (const auto& [interface, address] : nics) bindings.push_back({interface, address});
  return bindings;
}

}  // namespace holmes
