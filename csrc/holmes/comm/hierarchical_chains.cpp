#include "holmes/comm/hierarchical_chains.hpp"

#include <algorithm>

#include "holmes/core/error.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

// Contributions were divided when they were combined inside the clusters (CallOptions::average_over), so that no
// partial sum leaves the range of the result.
ReduceOp between_clusters(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

std::vector<WorkPtr> one(WorkPtr work) { return {std::move(work)}; }

// The crossing of one rank's share of a piece, compressed: every rank gets all encoded shares, its own too, and adds
// them up in cluster order, so that all of them have the same bits.
struct CompressedShare {
  std::shared_ptr<Compression> compression;
  Buffer share;
  std::shared_ptr<float> residual;  // null: no error feedback
  std::vector<Buffer> encoded;      // by cluster

  std::vector<WorkPtr> send(PartCommunicator& cross, ScratchPool& scratch, const CallOptions& call) {
    const std::size_t bytes = encoded_bytes(compression->codec(), share.count);
    const Buffer all = scratch.take(bytes * static_cast<std::size_t>(cross.size()), DType::uint8);
    for (int cluster = 0; cluster < cross.size(); ++cluster)
      encoded.push_back(slice(all, {bytes * static_cast<std::size_t>(cluster), bytes}));
    const Buffer own = encoded[static_cast<std::size_t>(cross.rank())];
    encode(compression->codec(), static_cast<const float*>(share.data), share.count, own.begin(), residual.get());
    residual.reset();
    return one(cross.all_gather(encoded, own, call));
  }

  void finish() {
    bool add = false;
    for (const Buffer& code : encoded) {
      decode(compression->codec(), code.begin(), share.count, static_cast<float*>(share.data), add);
      add = true;
    }
    encoded.clear();
  }
};

}  // namespace

void HierarchicalParts::fail(const Failure& failure) const {
  for (const auto* part : {&flat, &scatter, &cross, &gather})
    if (*part) (*part)->fail(failure);
}

CallOptions HierarchicalChains::call() const {
  // Too late: the operation fails with its own message, which says whom it waits for.
  return {.timeout = std::max<Duration>(deadline_ - Clock::now(), std::chrono::nanoseconds(1)), .async = true};
}

CallOptions HierarchicalChains::averaging_call() const {
  CallOptions options = call();
  options.average_over = parts_->flat->size();
  return options;
}

// What each rank of the cluster owns of a piece.
std::vector<Buffer> HierarchicalChains::shares(const Buffer& data, const Run& piece) const {
  const Hierarchy& at = parts_->hierarchy;
  std::vector<Buffer> shares;
  for (int i = 0; i < static_cast<int>(at.members().size()); ++i)
    shares.push_back(slice(data, at.share(piece, i, data.dtype)));
  return shares;
}

std::vector<Chain> HierarchicalChains::all_reduce(const Buffer& data, ReduceOp op,
                                                  const std::shared_ptr<Compression>& compression) const {
  const auto index = static_cast<std::size_t>(parts_->hierarchy.index());
  const std::vector<Run> pieces = cut_into_pieces(data.count, data.dtype);
  std::shared_ptr<float> residual;
  if (compression && parts_->hierarchy.owns_share()) {
    std::size_t count = 0;
    for (const Run& piece : pieces) count += shares(data, piece)[index].count;
    if (float* const memory = compression->acquire(count))
      residual.reset(memory, [compression](float*) { compression->release(); });
  }
  std::vector<Chain> chains;
  std::size_t done = 0;
  for (const Run& piece : pieces) {
    const std::vector<Buffer> parts = shares(data, piece);
    const Buffer own = parts[index];
    Chain chain;
    chain[0] = [self = *this, parts, own, op] {
      return one(self.parts_->scatter->reduce_scatter(own, parts, op, self.averaging_call()));
    };
    std::shared_ptr<CompressedShare> compressed;
    if (parts_->cross && compression) {
      compressed = std::make_shared<CompressedShare>(CompressedShare{compression, own, {}, {}});
      if (residual) compressed->residual = {residual, residual.get() + done};
      done += own.count;
      chain[1] = [self = *this, compressed] {
        return compressed->send(*self.parts_->cross, *self.parts_->scratch, self.call());
      };
    } else if (parts_->cross) {
      chain[1] = [self = *this, own, op] {
        return one(self.parts_->cross->all_reduce(own, between_clusters(op), self.call()));
      };
    }
    chain[2] = [self = *this, parts, own, compressed] {
      if (compressed) compressed->finish();
      return one(self.parts_->gather->all_gather(parts, own, self.call()));
    };
    chains.push_back(std::move(chain));
  }
  return chains;
}

std::vector<Chain> HierarchicalChains::reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs,
                                                      ReduceOp op) const {
  const Hierarchy& at = parts_->hierarchy;
  std::vector<Chain> chains;
  for (const Run& piece : cut_into_pieces(output.count, output.dtype)) {
    // What goes to the rank of this index in each cluster, summed over this cluster.
    const auto partial = std::make_shared<std::vector<Buffer>>();
    Chain chain;
    chain[0] = [self = *this, &at, piece, inputs, op, partial] {
      std::vector<WorkPtr> works;
      for (int k = 0; k < at.cluster_count(); ++k) {
        std::vector<Buffer> blocks;
        for (const int rank : at.members(k)) blocks.push_back(slice(inputs[static_cast<std::size_t>(rank)], piece));
        partial->push_back(self.parts_->scratch->take(piece.count, blocks.front().dtype));
        works.push_back(
            self.parts_->scatter->reduce_scatter(partial->back(), std::move(blocks), op, self.averaging_call()));
      }
      return works;
    };
    chain[1] = [self = *this, own = slice(output, piece), partial, op] {
      return one(self.parts_->cross->reduce_scatter(own, std::move(*partial), between_clusters(op), self.call()));
    };
    chains.push_back(std::move(chain));
  }
  return chains;
}

std::vector<Chain> HierarchicalChains::all_gather(const std::vector<Buffer>& outputs, const Buffer& input) const {
  const Hierarchy& at = parts_->hierarchy;
  std::vector<Chain> chains;
  for (const Run& piece : cut_into_pieces(input.count, input.dtype)) {
    const auto part = [&outputs, &piece](int rank) { return slice(outputs[static_cast<std::size_t>(rank)], piece); };
    std::vector<Buffer> crossing;
    for (const int rank : at.counterparts()) crossing.push_back(part(rank));
    std::vector<std::vector<Buffer>> inside;
    for (int k = 0; k < at.cluster_count(); ++k) {
      inside.emplace_back();
      for (const int rank : at.members(k)) inside.back().push_back(part(rank));
    }
    Chain chain;
    chain[1] = [self = *this, crossing, own = slice(input, piece)] {
      return one(self.parts_->cross->all_gather(crossing, own, self.call()));
    };
    chain[2] = [self = *this, crossing, inside] {
      std::vector<WorkPtr> works;
      for (std::size_t k = 0; k < inside.size(); ++k)
        works.push_back(self.parts_->gather->all_gather(inside[k], crossing[k], self.call()));
      return works;
    };
    chains.push_back(std::move(chain));
  }
  return chains;
}

std::vector<Chain> HierarchicalChains::broadcast(const Buffer& data, int root) const {
  const Hierarchy& at = parts_->hierarchy;
  const int root_cluster = at.cluster(root);
  const bool is_near = at.cluster() == root_cluster;
  std::vector<Chain> chains;
  for (const Run& piece : cut_into_pieces(data.count, data.dtype)) {
    const std::vector<Buffer> parts = shares(data, piece);
    const Buffer own = parts[static_cast<std::size_t>(at.index())];
    Chain chain;
    if (is_near)
      chain[0] = [self = *this, whole = slice(data, piece), index = at.index(root)] {
        return one(self.parts_->scatter->broadcast(whole, index, self.call()));
      };
    if (parts_->cross)
      chain[1] = [self = *this, own, root_cluster] {
        return one(self.parts_->cross->broadcast(own, root_cluster, self.call()));
      };
    if (!is_near)
      chain[2] = [self = *this, parts, own] { return one(self.parts_->gather->all_gather(parts, own, self.call())); };
    chains.push_back(std::move(chain));
  }
  return chains;
}

std::vector<Chain> HierarchicalChains::reduce(const Buffer& data, int root, ReduceOp op) const {
  const Hierarchy& at = parts_->hierarchy;
  const int root_cluster = at.cluster(root);
  std::vector<Chain> chains;
  for (const Run& piece : cut_into_pieces(data.count, data.dtype)) {
    const std::vector<Buffer> parts = shares(data, piece);
    // Only the root's data may change.
    const auto partial = std::make_shared<Buffer>();
    Chain chain;
    chain[0] = [self = *this, parts, op, partial, index = static_cast<std::size_t>(at.index())] {
      *partial = self.parts_->scratch->take(parts[index].count, parts[index].dtype);
      return one(self.parts_->scatter->reduce_scatter(*partial, parts, op, self.averaging_call()));
    };
    if (parts_->cross)
      chain[1] = [self = *this, partial, op, root_cluster] {
        return one(self.parts_->cross->reduce(*partial, root_cluster, between_clusters(op), self.call()));
      };
    if (at.cluster() == root_cluster)
      chain[2] = [self = *this, parts, partial, index = at.index(root)] {
        return one(self.parts_->gather->gather(parts, *partial, index, self.call()));
      };
    chains.push_back(std::move(chain));
  }
  return chains;
}

Buffer ScratchPool::take(std::size_t count, DType dtype) {
  std::size_t bytes = count * size_bytes(dtype);
  Block block;
  Block outgrown;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.lower_bound(bytes); found != free_.end()) {
      bytes = found->first;
      block = std::move(found->second);
      free_.erase(found);
    } else if (!free_.empty()) {
      outgrown = std::move(free_.begin()->second);
      free_.erase(free_.begin());
    }
  }
  if (!block) {
    outgrown.reset();
    block.reset(new std::byte[bytes]);
  }
  std::byte* const data = block.release();  // from here on the owner has it
  std::shared_ptr<void> owner(data, [self = shared_from_this(), bytes](void* memory) {
    Block back(static_cast<std::byte*>(memory));
    const std::lock_guard lock(self->mutex_);
    where_memory_allows([&] { self->free_.emplace(bytes, std::move(back)); });
  });
  return {data, count, dtype, std::move(owner)};
}

}  // namespace holmes
