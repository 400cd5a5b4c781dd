// CmaCall: one collective's part in the vote on CMA (see CmaVote).
#pragma once

#include <algorithm>
#include <optional>

#include "holmes/group/group.hpp"

namespace holmes {

class CmaCall {
public:
  // Decides, and tells the channels. `agreed_bytes` as all ranks know them; 0: there is no vote, the channels decide.
  void begin(Group& group, OpCode op, std::size_t agreed_bytes) {
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
  bool uses_cma() const { return uses_cma_; }
  // This rank's costs, as they travel.
  std::uint64_t costs_word() const { return costs_.word(); }
  // Whether to say when all ranks are in the operation: its time counts from then on.
  bool awaits_arrivals() const { return votes_ && !all_here_at_; }
  void all_arrived() { all_here_at_ = Clock::now(); }
  // `costs_of(peer)`: the word that came from it.
  template <typename CostsOf>
  void end(Group& group, const CostsOf& costs_of) {
    if (!votes_) return;
    std::optional<CmaVote::Costs> total;  // in the same order on every rank
    for (int rank = 0; rank < group.size; ++rank) {
      const auto costs = rank == group.rank ? costs_ : CmaVote::Costs::from(costs_of(rank));
      total = total ? *total + costs : costs;
      if (rank != group.rank) group.channels[rank]->set_cma(std::nullopt);
    }
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - all_here_at_.value_or(now)).count();
    group.cma_vote.ended(static_cast<int>(op_), bytes_, seconds, *total);
  }

private:
  bool votes_ = false;
  bool uses_cma_ = false;
  OpCode op_ = OpCode::barrier;
  std::size_t bytes_ = 0;
  CmaVote::Costs costs_;
  std::optional<Clock::time_point> all_here_at_;
};

}  // namespace holmes
