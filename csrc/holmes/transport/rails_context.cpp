#include "holmes/transport/rails_context.hpp"

#include "holmes/core/log.hpp"

namespace holmes {

void RailsContext::warn_of_loss(int peer, const ConnectionInfo& lost, const std::string& reason,
                                const std::string& others, const std::string& what_is) {
  {
    std::lock_guard lock(mutex);
    if (!warned_of.emplace(peer, lost.interface).second) return;
  }
  log(LogLevel::warn, label(own_rank),
      "communicator '" + communicator + "' lost the connection to rank " + std::to_string(label(peer)) + " (host " +
          lost.host + ") over NIC " + lost.interface + " (" + lost.local_address + " -> " + lost.remote_address +
          "): " + reason + "; it goes on over " + others + ", " + what_is +
          " sent again. Make a new communicator to use the NIC again");
}

std::shared_ptr<RailsContext> make_rails_context(const CommunicatorOptions& options, Clock::duration timeout) {
  auto context = std::make_shared<RailsContext>();
  context->communicator = options.name;
  context->own_rank = options.rank;
  context->labels = options.labels;
  context->timeout = timeout;
  return context;
}

}  // namespace holmes
