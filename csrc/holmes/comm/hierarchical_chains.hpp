// The hierarchical operations, each as chains of stages: inside the clusters, between them, inside again, and what is
// left to do without others.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "holmes/comm/hierarchy.hpp"
#include "holmes/comm/part_communicator.hpp"
#include "holmes/comm/stage_scheduler.hpp"
#include "holmes/core/types.hpp"
#include "holmes/reduce/compression.hpp"

namespace holmes {

// Memory for partial results, kept from one operation to the next. Holds as many blocks as were in use at once.
// Thread-safe.
class ScratchPool : public std::enable_shared_from_this<ScratchPool> {
public:
  // Uninitialised memory that comes back when the buffer's last owner goes.
  Buffer take(std::size_t count, DType dtype);

private:
  using Block = std::unique_ptr<std::byte[]>;

  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_;  // by bytes
};

// The communicators a hierarchical one is made of. Two inside the cluster, one for each stage there, so that the order
// of the operations on each is the same on all ranks.
struct HierarchicalParts {
  Hierarchy hierarchy;
  std::shared_ptr<PartCommunicator> flat{};     // all ranks, on the NICs all of them share
  std::shared_ptr<PartCommunicator> scatter{};  // this rank's cluster, on its NICs: first stage
  std::shared_ptr<PartCommunicator> cross{};    // equal index in every cluster, on the NICs all share; null: no share
  std::shared_ptr<PartCommunicator> gather{};   // this rank's cluster, on its NICs: last stage

  std::shared_ptr<ScratchPool> scratch = std::make_shared<ScratchPool>();

  // Ends all of them; does not run callbacks in the calling thread.
  void fail(const Failure& failure) const;
};

// How what crosses is compressed, and what the compression keeps of it. Null: not at all.
struct Crossing {
  std::shared_ptr<Compression> compression{};
  Compression::Kept kept{};
};

// Makes the chains of one operation. All ranks of the group do so with matching arguments.
class HierarchicalChains {
public:
  // `waits`: their steps return when they are done.
  HierarchicalChains(std::shared_ptr<const HierarchicalParts> parts, Clock::time_point deadline, bool waits)
      : parts_(std::move(parts)), deadline_(deadline), waits_(waits) {}

  // Per piece: reduce-scatter inside, all-reduce of the shares between, all-gather inside; all in place.
  std::vector<Chain> all_reduce(const Buffer& data, ReduceOp op, const Crossing& crossing) const;
  // Per piece: for each cluster k a reduce-scatter inside of what its ranks are to get, then a reduce-scatter between;
  // what ranks beyond the owners of shares get then goes to them from those. Compressed: counts all equal, clusters of
  // equal size.
  std::vector<Chain> reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op,
                                    const Crossing& crossing) const;
  // Per piece: the blocks of ranks beyond the owners of shares go to those, all-gather between, then for each cluster
  // an all-gather inside of what came from it. Compressed: as reduce_scatter.
  std::vector<Chain> all_gather(const std::vector<Buffer>& outputs, const Buffer& input,
                                const Crossing& crossing) const;
  // Per piece: broadcast inside the root's cluster, broadcast of the shares between, all-gather inside the others.
  std::vector<Chain> broadcast(const Buffer& data, int root) const;
  // Per piece: reduce-scatter inside, reduce of the shares to the root's cluster, gather inside that.
  std::vector<Chain> reduce(const Buffer& data, int root, ReduceOp op) const;

  // What all_reduce of `data` may compress on this rank, in elements.
  std::size_t crossing_count(const Buffer& data) const;

private:
  CallOptions call() const;
  CallOptions averaging_call() const;
  std::vector<Buffer> shares(const Buffer& data, const Run& piece) const;
  // Of few bytes: one operation a stage, of what is copied together for it.
  Chain small_reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs, ReduceOp op) const;
  Chain small_all_gather(const std::vector<Buffer>& outputs, const Buffer& input) const;
  // Each rank beyond the owners of shares sends the block `own` to the owner that it crosses with, where it is `held`
  // (by rank), or receives it.
  std::vector<WorkPtr> hand_over(PartCommunicator& inside, bool to_owners, const Buffer& own,
                                 const std::function<Buffer(int)>& held) const;
  // By index of this rank's cluster: the blocks of `cluster` that cross in this round with the owners of shares.
  std::vector<Buffer> blocks_inside(const std::vector<Buffer>& blocks, int cluster, int round) const;

  std::shared_ptr<const HierarchicalParts> parts_;
  Clock::time_point deadline_;
  bool waits_;
};

}  // namespace holmes
