#include "holmes/collectives/cma_call.hpp"

#include <algorithm>

namespace holmes {

void CmaCall::begin(Group& group, OpCode op, std::size_t agreed_bytes) {
  votes_ = group.all_shared_memory && CmaVote::concerns(agreed_bytes, group.size);
  if (!votes_) return;
  op_ = op;
  bytes_ = agreed_bytes;
  uses_cma_ = group.cma_vote.uses_cma(static_cast<int>(op), agreed_bytes);
  CmaUse use = CmaUse::always;
  for (const auto& channel : group.channels) {
    if (!channel) continue;
    use = std::min(use, channel->cma_use());
    channel->set_cma(uses_cma_);
  }
  costs_ = group.cma_vote.costs(static_cast<int>(op), agreed_bytes, use);
}

}  // namespace holmes
