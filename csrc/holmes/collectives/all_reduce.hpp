// AllReduce: reduce-scatter and all-gather in one pipeline. Between two ranks travels one stream of slices:
// contributions to the receiver's block, and, `lag` slices behind, results of the sender's block: while the caches hold
// them. By CMA and in place, which are faster in long runs, results follow after all contributions (measured in place,
// 2 ranks, 16 MiB: slices in turns take 1.8 times as long); on a far path too, or the path would run dry, and where
// what is large goes from memory to memory, in runs that are worth an offer. No step waits for another to end.
#pragma once

#include "holmes/collectives/slice_reducer.hpp"

namespace holmes {

class AllReduce final : public ReducingCollective {
public:
  AllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer data);
  void start() override { reducer_.start(); }

protected:
  // Two ranks have one flow each way, with which nothing competes.
  Pacing pacing() const override { return group_.size > 2 ? Pacing::by_received : Pacing::none; }
  std::size_t send_total_bytes(int peer) const override;
  std::size_t recv_total_bytes(int peer) const override { return send_total_bytes(peer); }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override;
  // All ranks send in the same order, also because those that keep pace count bytes of both kinds.
  std::size_t agreed_bytes() const override { return data_.bytes(); }
  bool sends_shared() const override { return is_shared(data_); }
  bool append_touched(Touched& touched) const override;
  std::optional<std::size_t> contributed_bytes(int peer) const override;

private:
  AllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer data,
            Block own);

  // A position in the stream between two ranks: so far so many contribution and result bytes, and what is next.
  struct Position {
    std::size_t contribution_bytes = 0;
    std::size_t result_bytes = 0;
    bool next_is_contribution = false;
    std::size_t run_bytes = 0;  // until the kind changes
  };
  Block block(int rank) const { return equal_block(data_.bytes(), group_.size, rank); }
  // Where a stream with `contributions` and `results` bytes in total stands after `done_bytes`.
  Position position(std::size_t contributions, std::size_t results, std::size_t done_bytes) const;
  Position in_position(int peer) const;

  // Results follow contributions this many slices later, so that a slice is reduced while others travel.
  static constexpr std::size_t lag = 2;

  Buffer data_;
  Block own_;
};

}  // namespace holmes
