// RailsContext: what the rails of one communicator, TCP connections or RDMA ports, have in common.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/clock.hpp"
#include "holmes/core/connection_info.hpp"
#include "holmes/core/options.hpp"

namespace holmes {

// What the rails of one communicator share with each other and its log lines.
struct RailsContext {
  std::string communicator;
  int own_rank = 0;
  std::vector<int> labels;  // number of each rank in messages, by rank; empty: its own
  // Without an acknowledgement for so long, a rail is lost.
  Clock::duration timeout = std::chrono::seconds(2);
  std::mutex mutex;                                 // protects what follows
  std::set<std::pair<int, std::string>> warned_of;  // peer and interface

  // Says once of a peer and interface that its connection is lost, why, over which others the stream goes on, and
  // `what_is` sent again.
  void warn_of_loss(int peer, const ConnectionInfo& lost, const std::string& reason, const std::string& others,
                    const std::string& what_is);
  int label(int rank) const { return labels.empty() ? rank : labels[static_cast<std::size_t>(rank)]; }
};

std::shared_ptr<RailsContext> make_rails_context(const CommunicatorOptions& options, Clock::duration timeout);

}  // namespace holmes
