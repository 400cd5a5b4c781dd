// CopyCall: one collective's part in the vote on how ranks copy (see CopyVote).
#pragma once

#include <algorithm>
#include <optional>

#include "holmes/group/group.hpp"
#include "holmes/reduce/copy.hpp"

namespace holmes {

class CopyCall {
public:
  // Decides, and tells the channels, but where what this rank sends is in shared buffers: whether that is so everywhere
  // it learns from the others' headers. `agreed_bytes` as all ranks know them; 0: there is no vote, the channels
  // decide.
  template <typename SendsShared>
  void begin(Group& group, OpCode op, std::size_t agreed_bytes, const SendsShared& sends_shared) {
    votes_ = group.all_shared_memory && CopyVote::concerns(agreed_bytes, group.size);
    if (!votes_) return;
    op_ = op;
    bytes_ = agreed_bytes;
    const bool is_shared = sends_shared();
    ballot_ = group.copy_vote.ballot(static_cast<int>(op), agreed_bytes, is_shared, abilities(group));
    is_decided_ = false;
    if (!is_shared) decide(group, CopyVote::ordinary);
  }
  // Before, only headers travel.
  bool is_decided() const { return is_decided_; }
  CopyWay way() const { return way_; }
  // What this rank tells the others.
  const CopyVote::Ballot& ballot() const { return ballot_; }
  // Whether the ranks decide together, for which all of them must be heard.
  bool votes() const { return votes_; }
  // Whether to say when all ranks are in the operation: its time counts from then on.
  bool awaits_arrivals() const { return votes_ && !all_here_at_; }
  // `ballot_of(peer)`: what came from it.
  template <typename BallotOf>
  void all_arrived(Group& group, const BallotOf& ballot_of) {
    all_here_at_ = Clock::now();
    if (is_decided_) return;
    bool are_shared = true;
    for (int rank = 0; rank < group.size; ++rank) are_shared &= rank == group.rank || ballot_of(rank).is_shared != 0;
    decide(group, are_shared ? CopyVote::shared : CopyVote::ordinary);
  }
  template <typename BallotOf>
  void end(Group& group, const BallotOf& ballot_of) {
    if (!votes_) return;
    bool was_refused = false;
    std::optional<CopyVote::Costs> total;  // in the same order on every rank
    for (int rank = 0; rank < group.size; ++rank) {
      const CopyVote::Costs costs = (rank == group.rank ? ballot_ : ballot_of(rank)).costs(memory_);
      total = total ? *total + costs : costs;
      if (rank == group.rank) continue;
      group.channels[rank]->set_way(std::nullopt, /*bypass_cache=*/false);
      was_refused |= group.channels[rank]->was_refused_in_place();
    }
    const auto now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - all_here_at_.value_or(now)).count();
    group.copy_vote.ended(static_cast<int>(op_), bytes_, memory_, seconds, *total);
    if (was_refused) group.copy_vote.was_refused_in_place();
  }

private:
  static CopyVote::Abilities abilities(const Group& group) {
    CopyVote::Abilities all{.cma = CmaUse::always, .in_place = true};
    for (const auto& channel : group.channels) {
      if (!channel) continue;
      all.cma = std::min(all.cma, channel->cma_use());
      all.in_place &= channel->may_read_in_place();
    }
    return all;
  }
  void decide(Group& group, CopyVote::Memory memory) {
    is_decided_ = true;
    memory_ = memory;
    way_ = group.copy_vote.way(static_cast<int>(op_), bytes_, memory);
    for (const auto& channel : group.channels)
      if (channel) channel->set_way(way_, bytes_ >= cache_bypass_bytes);
  }

  bool votes_ = false;
  bool is_decided_ = true;
  CopyWay way_ = CopyWay::ring;
  OpCode op_ = OpCode::barrier;
  std::size_t bytes_ = 0;
  CopyVote::Memory memory_ = CopyVote::ordinary;
  CopyVote::Ballot ballot_{};
  std::optional<Clock::time_point> all_here_at_;
};

}  // namespace holmes
