// What a communicator may be told of NCCL.
#pragma once

#include <optional>
#include <string>

#include "holmes/nccl/abi.hpp"

namespace holmes::nccl {

// Alike on all ranks. Absent: NCCL's choice. What the NCCL in use does not know is refused.
struct Settings {
  std::optional<int> min_ctas{};
  std::optional<int> max_ctas{};
  std::optional<int> cga_cluster_size{};
  std::optional<int> cta_policy{};     // 2.27 and later; NCCL's NCCL_CTA_POLICY_*
  std::optional<int> traffic_class{};  // 2.26 and later; of its network's packets
  std::string comm_name{};             // 2.27 and later; in NCCL's own messages
  // Whether its asynchronous operations run on a stream of the highest priority.
  bool high_priority = false;
  // Whether what is split from it uses its connections and memory; a split that fails may then end it too.
  bool split_share = false;
};

// NCCL's own form, blocking, for `version` (21803 is 2.18.3). Points into `settings`. Throws UsageError for a value
// that is not possible, or that this version does not know.
Config config_of(const Settings& settings, int version);

}  // namespace holmes::nccl
