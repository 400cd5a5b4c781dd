// ShortBruck: a short call in log2(n) steps, as BruckAllGather and BruckReduce.
#pragma once

#include "holmes/collectives/bruck_steps.hpp"
#include "holmes/collectives/short_call.hpp"

namespace holmes {

// Of all_gather, barrier, broadcast, all_reduce and reduce_scatter, with blocks of most_short_bytes at most: what a
// rank has for all others, where it is reduced, and else what it has for any of them.
class ShortBruck final : public ShortCall {
public:
  ShortBruck(Group& group, const Signature& signature) : ShortCall(group, signature) {}

  bool has_room() const override;
  bool send() override;
  ShortState take() override;

private:
  std::size_t block_bytes(int rank) const;
  void prepare();
  bool send_step(int step);
  void finish();
  std::byte* slot(std::size_t number) { return staging_.data() + begin_[number]; }

  const BruckSteps steps_{group_.rank, group_.size};
  int step_ = 0;                                   // whose message is awaited
  std::array<std::size_t, most_ranks + 1> begin_;  // of each slot; one more for the end
  alignas(64) std::array<std::byte, most_ranks * most_short_bytes> staging_;
};

}  // namespace holmes
