// Bruck: all ranks' small blocks to all ranks in ceil(log2 n) messages a rank instead of n - 1 (Bruck et al.,
// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997). In step k a rank
// sends all it has to the rank 2^k below it and gets as much from the rank 2^k above. The bytes are those of a direct
// exchange.
#pragma once

#include "holmes/collectives/bruck_steps.hpp"
#include "holmes/collectives/collective.hpp"

namespace holmes {

// The part that moves blocks; the collectives below differ in what they make of them.
class Bruck : public Collective {
public:
  // `block_bytes[r]` is the size of rank r's block.
  Bruck(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
        std::vector<std::size_t> block_bytes);
  void start() override;

protected:
  // Writes this rank's block.
  virtual void fill_own(std::byte* block) = 0;
  // All blocks are there.
  virtual void finish() = 0;
  // Valid in `finish`.
  const std::byte* block(int rank) const { return staging_ + begin_[steps_.slot_of(rank)]; }

  bool sends_to(int peer) const final { return steps_.step_to(peer) >= 0; }
  bool receives_from(int peer) const final { return steps_.step_from(peer) >= 0; }
  bool may_send(int peer) const final { return steps_received() >= steps_.step_to(peer); }
  std::size_t send_total_bytes(int peer) const final {
    return sends_to(peer) ? steps_.sent_bytes(begin_, steps_.step_to(peer)) : 0;
  }
  std::size_t recv_total_bytes(int peer) const final;
  iovec next_send(int peer, std::size_t done_bytes) final;
  iovec next_recv(int peer, std::size_t done_bytes) final;
  bool compute() final;
  bool is_computed() const final { return finished_; }

private:
  int steps_received() const;

  const BruckSteps steps_{group_.rank, group_.size};
  std::vector<std::size_t> begin_;  // of each slot in staging; one more for the end
  std::byte* staging_ = nullptr;
  bool finished_ = false;
};

// all_gather of counts that may differ between ranks, and barrier.
class BruckAllGather final : public Bruck {
public:
  BruckAllGather(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                 std::vector<Buffer> outputs, Buffer input);

private:
  void fill_own(std::byte* block) override;
  void finish() override;

  std::vector<Buffer> outputs_;
  Buffer input_;
};

// all_reduce, and reduce_scatter of small inputs: everybody gets everything and reduces what it wants, in rank order,
// as the direct forms do: the results are the same bit for bit.
class BruckReduce final : public Bruck {
public:
  // `inputs` follow one another; from element `begin` of them on, the reduction over all ranks lands in `output`.
  BruckReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer output,
              std::vector<Buffer> inputs, std::size_t begin);

private:
  void fill_own(std::byte* block) override;
  void finish() override;

  Buffer output_;
  std::vector<Buffer> inputs_;
  std::size_t begin_bytes_;
};

}  // namespace holmes
