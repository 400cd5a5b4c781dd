// Exchange: every rank sends one buffer to and receives one from each other rank. All collectives without arithmetic
// are exchanges (all_gather, all_to_all, broadcast, gather, scatter, barrier), and so is a small all_reduce.
#pragma once

#include "holmes/collectives/collective.hpp"

namespace holmes {

class Exchange : public Collective {
public:
  // `sends[r]` goes to rank r, `recvs[r]` comes from rank r; an empty buffer means nothing. The own entries are copied.
  Exchange(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
           std::vector<Buffer> sends, std::vector<Buffer> recvs);

protected:
  bool may_end_early() const override { return true; }
  Pacing pacing() const override { return Pacing::by_share; }
  std::size_t agreed_bytes() const override;
  // Of a broadcast: what comes, too, as those who only receive are not to wait for what the root's memory is.
  bool sends_shared() const override;
  std::size_t send_total_bytes(int peer) const override { return sends_[peer].bytes(); }
  std::size_t recv_total_bytes(int peer) const override { return recvs_[peer].bytes(); }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override;
  ComputeTurn compute_turn() const override;
  bool compute() override;
  bool is_computed() const override { return copied_; }
  bool append_touched(Touched& touched) const override;

  std::vector<Buffer> sends_;
  std::vector<Buffer> recvs_;

private:
  bool copied_ = false;
};

// all_reduce in one step: everybody sends all of it to everybody and reduces on its own, in rank order. For small
// counts, and for two ranks that are far from each other, which send no more bytes so and wait half a round trip.
class OneStepAllReduce final : public Exchange {
public:
  OneStepAllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                   Buffer data);
  void start() override;

protected:
  std::size_t agreed_bytes() const override { return 0; }
  ComputeTurn compute_turn() const override { return ComputeTurn::after_receiving; }
  bool compute() override;
  bool is_computed() const override { return reduced_; }
  bool append_touched(Touched& touched) const override;

private:
  Buffer data_;
  bool reduced_ = false;
};

}  // namespace holmes
