// HierarchicalCommunicator: the Communicator for a group that spans clusters. Large operations run inside each cluster
// on its own NICs and cross the NICs all ranks share only with each rank's share; the others run flat, each pair of
// ranks on its best NICs.
#pragma once

#include "holmes/comm/hierarchical_chains.hpp"

namespace holmes {

// Hierarchical from min_bytes() on: all_reduce, broadcast and reduce; reduce_scatter and all_gather where it is less
// for the busiest rank's way between the clusters. Everything else is flat. Which form runs is a matter of the
// arguments, so all ranks choose alike; every hierarchical operation is announced on the flat communicator too, which
// finds ranks that disagree.
class HierarchicalCommunicator final : public Communicator {
public:
  // Collective. `options.clusters` names two clusters or more; `options.hierarchical_min_bytes` is not `never`. Takes a
  // measurement of up to some tenths of a second where the options do not say min_bytes().
  HierarchicalCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options);
  ~HierarchicalCommunicator() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  const std::string& name() const override { return options_.name; }
  // Bytes (of the larger of a rank's buffers) from which on an operation runs hierarchically; never_hierarchical: none.
  std::uint64_t min_bytes() const { return min_bytes_; }

  WorkPtr all_reduce(Buffer data, ReduceOp op, CallOptions call) override;
  WorkPtr reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call) override;
  WorkPtr all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) override;
  WorkPtr broadcast(Buffer data, int root, CallOptions call) override;
  WorkPtr reduce(Buffer data, int root, ReduceOp op, CallOptions call) override;
  WorkPtr gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) override;
  WorkPtr scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) override;
  WorkPtr all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call) override;
  WorkPtr barrier(CallOptions call) override;
  WorkPtr send(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  WorkPtr recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) override;
  WorkPtr recv_any(Buffer data, std::uint32_t tag, CallOptions call) override;
  std::vector<WorkPtr> batch(std::vector<P2pCall> calls, CallOptions call) override;
  std::shared_ptr<Communicator> split(int color, int key) override;
  void abort(const std::string& reason) override;
  bool is_dead() const override { return scheduler_->has_failed() || parts_->flat->is_dead(); }
  std::vector<ConnectionInfo> connections() const override;
  std::vector<CommunicatorRecord> flight_record() const override;

private:
  void connect_parts();
  void choose_min_bytes();
  PartCommunicator& flat() const;
  // An operation of its own is ready to be announced: `make(chains)` gives its chains.
  template <typename Make>
  WorkPtr start(Signature signature, std::uint64_t bytes, const CallOptions& call, const Make& make, Form form);
  // As `start`, of what `compression` (may be null) makes smaller between the clusters. `share`: the elements that this
  // rank encodes; `reference_count`: those of which it may keep what has arrived.
  template <typename Make>
  WorkPtr start_crossing(Signature signature, std::uint64_t bytes, const CallOptions& call,
                         const std::shared_ptr<Compression>& compression, std::size_t share,
                         std::size_t reference_count, const Make& make);
  bool is_rank(int value) const { return value >= 0 && value < options_.size; }
  // Whether blocks go hierarchically from so many bytes on: there is one for each rank, this one's is like `own`, and
  // something is saved.
  bool takes_blocks(const std::vector<Buffer>& blocks, const Buffer& own, std::uint64_t min_bytes) const;
  // Whether the blocks, and the clusters, are of equal size.
  bool is_even(const std::vector<Buffer>& blocks) const;

  std::shared_ptr<Store> store_;
  CommunicatorOptions options_;
  std::shared_ptr<HierarchicalParts> parts_;
  std::shared_ptr<StageScheduler> scheduler_;
  std::uint64_t min_bytes_ = 0;
  std::uint64_t min_gather_bytes_ = 0;  // the same of all_gather
  int splits_ = 0;
};

}  // namespace holmes
