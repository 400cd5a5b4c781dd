// ReduceScatter: block r of every rank goes straight to rank r, which reduces them slice by slice in rank order. It
// moves the fewest bytes possible, each block is summed on one rank only, and 16-bit sums are rounded once. reduce is
// the case in which only the root has a block.
#pragma once

#include "holmes/collectives/reducing_collective.hpp"

namespace holmes {

class ReduceScatter final : public ReducingCollective {
public:
  ReduceScatter(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                Buffer output, std::vector<Buffer> inputs);
  void start() override { reducer_.start(); }

protected:
  Pacing pacing() const override { return Pacing::by_received; }
  std::size_t agreed_bytes() const override { return total_bytes(inputs_); }
  std::size_t send_total_bytes(int peer) const override { return inputs_[peer].bytes(); }
  std::size_t recv_total_bytes(int /*peer*/) const override { return reducer_.block_bytes(); }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override { return reducer_.next_recv(peer, done_bytes); }

private:
  Buffer output_;
  std::vector<Buffer> inputs_;
};

}  // namespace holmes
