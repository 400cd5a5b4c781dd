// ReduceScatter and GatherReduce: every block is reduced on one rank, and stays there, or goes on to a root.
#pragma once

#include "holmes/collectives/slice_reducer.hpp"

namespace holmes {

// Block r of every rank goes straight to rank r, which reduces them slice by slice in rank order. It moves the fewest
// bytes possible, each block is summed on one rank only, and 16-bit sums are rounded once. reduce is the case in which
// only the root has a block.
class ReduceScatter final : public ReducingCollective {
public:
  ReduceScatter(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                Buffer output, std::vector<Buffer> inputs);
  void start() override { reducer_.start(); }

protected:
  bool may_end_early() const override { return true; }
  Pacing pacing() const override { return Pacing::by_received; }
  std::size_t agreed_bytes() const override { return total_bytes(inputs_); }
  bool sends_shared() const override { return std::ranges::all_of(inputs_, is_shared); }
  bool append_touched(Touched& touched) const override {
    touched.add(inputs_);
    touched.add(output_);
    return true;
  }
  std::size_t send_total_bytes(int peer) const override { return inputs_[peer].bytes(); }
  std::size_t recv_total_bytes(int /*peer*/) const override { return reducer_.block_bytes(); }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override { return reducer_.next_recv(peer, done_bytes); }

private:
  Buffer output_;
  std::vector<Buffer> inputs_;
};

// Reduce to a root. Every rank but the root reduces one block, slice by slice and in rank order, and
// sends the result to the root while the next slice arrives. Every rank sends and receives as many bytes as the data
// has, and the results are those of ReduceScatter to a root bit for bit.
class GatherReduce final : public ReducingCollective {
public:
  GatherReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer data);
  void start() override;

protected:
  // The root receives results only, which come later than what it sends.
  Pacing pacing() const override { return is_root() ? Pacing::by_sent : Pacing::by_received; }
  std::size_t send_total_bytes(int peer) const override;
  std::size_t recv_total_bytes(int peer) const override;
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override;
  bool awaits_peek(int peer) const override { return !is_root() && ReducingCollective::awaits_peek(peer); }
  bool has_room() const override { return is_root() || reducer_.has_room(sent_bytes(root_)); }

private:
  GatherReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer data,
               Block own);
  // The root has nothing to receive while the first slice travels (measured, 16 MiB over 4 links of 1 Gbit/s: 167 ms,
  // with slices of 256 KiB 182 ms, in turns on a busy machine).
  static constexpr std::size_t most_slice_bytes = 64 * 1024;

  bool is_root() const { return group_.rank == root_; }
  Block block(int rank) const { return block_beside_root(data_.bytes(), group_.size, root_, rank); }

  Buffer data_;
  int root_;
};

}  // namespace holmes
