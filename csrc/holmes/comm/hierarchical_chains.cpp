#include "holmes/comm/hierarchical_chains.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "holmes/core/error.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

// Contributions were divided when they were combined inside the clusters (CallOptions::average_over), so that no
// partial sum leaves the range of the result.
ReduceOp between_clusters(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

std::vector<WorkPtr> one(WorkPtr work) { return {std::move(work)}; }

// What crosses of one piece, encoded: a part for each cluster.
struct EncodedParts {
  Codec codec;
  std::vector<Buffer> parts;  // by cluster; what has come, or is to go

  EncodedParts(Codec codec_, ScratchPool& scratch, int clusters, std::size_t count, int left_out = -1) : codec(codec_) {
    const std::size_t bytes = encoded_bytes(codec, count);
    const Buffer all = scratch.take(bytes * static_cast<std::size_t>(clusters), DType::uint8);
    for (int cluster = 0; cluster < clusters; ++cluster)
      parts.push_back(
          slice(all, {bytes * static_cast<std::size_t>(cluster), cluster == left_out ? std::size_t{0} : bytes}));
  }
  const Buffer& of(int cluster) const { return parts[static_cast<std::size_t>(cluster)]; }
  void encode_to(int cluster, const float* values, std::size_t count, float* residual) const {
    encode(codec, values, count, of(cluster).begin(), residual);
  }
  void decode_from(int cluster, float* values, std::size_t count, bool add) const {
    decode(codec, of(cluster).begin(), count, values, add);
  }
};

float* floats(const Buffer& buffer) { return static_cast<float*>(buffer.data); }

// Of each block its part number `number` of `pieces`.
std::vector<Buffer> pieces_of(const std::vector<Buffer>& blocks, std::size_t pieces, std::size_t number) {
  std::vector<Buffer> parts;
  for (const Buffer& block : blocks)
    parts.push_back(slice(block, equal_part({0, block.count}, pieces, number, block.dtype)));
  return parts;
}

// To copy less costs less than an operation more.
constexpr std::size_t together_bytes = 64 * 1024;

void copy(const Buffer& to, const Buffer& from) {
  if (from.count) std::memcpy(to.data, from.data, from.bytes());
}

// Memory for a block of each rank, as large as `blocks`: all that cross with one owner of a share in a row, cluster by
// cluster. Buffers of ranks that own none are empty.
class Together {
public:
  Together(const Hierarchy& at, const std::vector<Buffer>& blocks, ScratchPool& scratch)
      : index_(static_cast<std::size_t>(at.index())),
        by_rank_(blocks.size()),
        by_index_(no_data(blocks.front().dtype, static_cast<int>(at.members().size()))),
        by_cluster_(no_data(blocks.front().dtype, at.cluster_count())) {
    const DType dtype = blocks.front().dtype;
    const Buffer all = scratch.take(total_bytes(blocks) / size_bytes(dtype), dtype);
    std::size_t begin = 0;
    for (int index = 0; index < at.share_count(); ++index) {
      const std::size_t first = begin;
      for (int cluster = 0; cluster < at.cluster_count(); ++cluster) {
        const std::size_t first_of_cluster = begin;
        for (int round = 0; round < at.rounds(cluster); ++round) {
          const auto rank = at.crossing_rank(cluster, index, round);
          if (!rank) continue;
          const std::size_t count = blocks[static_cast<std::size_t>(*rank)].count;
          by_rank_[static_cast<std::size_t>(*rank)] = slice(all, {begin, count});
          begin += count;
        }
        if (index == at.index())
          by_cluster_[static_cast<std::size_t>(cluster)] = slice(all, {first_of_cluster, begin - first_of_cluster});
      }
      by_index_[static_cast<std::size_t>(index)] = slice(all, {first, begin - first});
    }
  }

  const std::vector<Buffer>& by_rank() const { return by_rank_; }
  const std::vector<Buffer>& by_index() const { return by_index_; }  // for each rank of this cluster: what it owns
  const Buffer& own() const { return by_index_[index_]; }
  const std::vector<Buffer>& by_cluster() const { return by_cluster_; }  // of what this rank owns

private:
  std::size_t index_;
  std::vector<Buffer> by_rank_;
  std::vector<Buffer> by_index_;
  std::vector<Buffer> by_cluster_;
};

// Of `kept`, which may be null, from the value numbered `begin` on.
std::shared_ptr<float> from(const std::shared_ptr<float>& kept, std::size_t begin) {
  return kept ? std::shared_ptr<float>(kept, kept.get() + begin) : nullptr;
}

// The crossing of one rank's share of a piece of an all_reduce: every rank gets all encoded shares, its own too, and
// adds them up in cluster order, so that all of them have the same bits.
struct CompressedShare {
  Crossing crossing;
  Buffer share;
  std::shared_ptr<float> residual;
  std::optional<EncodedParts> encoded{};

  std::vector<WorkPtr> send(PartCommunicator& cross, ScratchPool& scratch, const CallOptions& call) {
    encoded.emplace(crossing.compression->codec(), scratch, cross.size(), share.count);
    encoded->encode_to(cross.rank(), floats(share), share.count, residual.get());
    residual.reset();
    return one(cross.all_gather(encoded->parts, encoded->of(cross.rank()), call));
  }
  void finish() {
    for (int cluster = 0; cluster < static_cast<int>(encoded->parts.size()); ++cluster)
      encoded->decode_from(cluster, floats(share), share.count, cluster > 0);
    encoded.reset();
    crossing = {};
  }
};

// The crossing of a piece of a reduce_scatter: what other clusters are to get goes to them encoded, the own cluster's
// part is left as it is.
struct CompressedScatter {
  Crossing crossing;
  Buffer output;
  std::shared_ptr<float> residual;
  Buffer own{};
  std::optional<EncodedParts> received{};

  std::vector<WorkPtr> send(PartCommunicator& cross, ScratchPool& scratch, std::vector<Buffer> partial,
                            const CallOptions& call) {
    const Codec codec = crossing.compression->codec();
    const EncodedParts sent(codec, scratch, cross.size(), output.count, cross.rank());
    received.emplace(codec, scratch, cross.size(), output.count, cross.rank());
    std::size_t done = 0;
    for (int cluster = 0; cluster < cross.size(); ++cluster) {
      if (cluster == cross.rank()) continue;
      sent.encode_to(cluster, floats(partial[static_cast<std::size_t>(cluster)]), output.count,
                     residual ? residual.get() + done : nullptr);
      done += output.count;
    }
    residual.reset();
    own = partial[static_cast<std::size_t>(cross.rank())];
    return one(cross.all_to_all(received->parts, sent.parts, call));
  }
  // In cluster order.
  void finish(int own_cluster) {
    float* const sum = floats(output);
    for (int cluster = 0; cluster < static_cast<int>(received->parts.size()); ++cluster) {
      if (cluster != own_cluster) {
        received->decode_from(cluster, sum, output.count, cluster > 0);
        continue;
      }
      const float* const values = floats(own);
      for (std::size_t i = 0; i < output.count; ++i) sum[i] = cluster > 0 ? sum[i] + values[i] : values[i];
    }
    received.reset();
    own = {};
    crossing = {};
  }
};

// The crossing of a piece of an all_gather. Every rank decodes all parts, its own too, so that all have the same bits.
struct CompressedGather {
  Crossing crossing;
  std::vector<Buffer> outputs;  // by cluster
  Buffer input;
  std::shared_ptr<float> residual;
  std::vector<std::shared_ptr<float>> references;  // by cluster; empty without differences
  std::shared_ptr<std::atomic<std::size_t>> pieces_left;
  std::optional<EncodedParts> encoded{};

  std::vector<WorkPtr> send(PartCommunicator& cross, ScratchPool& scratch, const CallOptions& call) {
    if (crossing.kept.is_first) return one(cross.all_gather(outputs, input, call));
    encoded.emplace(crossing.compression->codec(), scratch, cross.size(), input.count);
    Buffer sent = input;
    if (!references.empty()) {
      sent = scratch.take(input.count, DType::float32);
      const float* const reference = references[static_cast<std::size_t>(cross.rank())].get();
      for (std::size_t i = 0; i < input.count; ++i) floats(sent)[i] = floats(input)[i] - reference[i];
    }
    encoded->encode_to(cross.rank(), floats(sent), input.count, residual.get());
    return one(cross.all_gather(encoded->parts, encoded->of(cross.rank()), call));
  }
  void finish() {
    for (std::size_t cluster = 0; cluster < outputs.size(); ++cluster) {
      float* const output = floats(outputs[cluster]);
      const std::size_t bytes = outputs[cluster].bytes();
      float* const reference = references.empty() ? nullptr : references[cluster].get();
      if (crossing.kept.is_first) {
        std::memcpy(reference, output, bytes);
        continue;
      }
      encoded->decode_from(static_cast<int>(cluster), reference ? reference : output, input.count,
                           reference != nullptr);
      if (reference) std::memcpy(output, reference, bytes);
    }
    encoded.reset();
    residual.reset();
    references.clear();
    if (pieces_left->fetch_sub(1) == 1 && crossing.kept.reference) crossing.compression->complete_reference();
    crossing = {};
  }
};

}  // namespace

void HierarchicalParts::fail(const Failure& failure) const {
  for (const auto* part : {&flat, &scatter, &cross, &gather})
    if (*part) (*part)->fail(failure);
}

CallOptions HierarchicalChains::call() const {
  // Too late: the operation fails with its own message, which says whom it waits for.
  return {.timeout = std::max<Duration>(deadline_ - Clock::now(), std::chrono::nanoseconds(1)), .async = !waits_};
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

std::size_t HierarchicalChains::crossing_count(const Buffer& data) const {
  const Hierarchy& at = parts_->hierarchy;
  if (!at.owns_share()) return 0;
  std::size_t count = 0;
  for (const Run& piece : cut_into_pieces(data.count, data.dtype))
    count += at.share(piece, at.index(), data.dtype).count;
  return count;
}

std::vector<Chain> HierarchicalChains::all_reduce(const Buffer& data, ReduceOp op, const Crossing& crossing) const {
  const auto index = static_cast<std::size_t>(parts_->hierarchy.index());
  std::vector<Chain> chains;
  std::size_t done = 0;
  for (const Run& piece : cut_into_pieces(data.count, data.dtype)) {
    const std::vector<Buffer> parts = shares(data, piece);
    const Buffer own = parts[index];
    Chain chain;
    chain[0] = [self = *this, parts, own, op] {
      return one(self.parts_->scatter->reduce_scatter(own, parts, op, self.averaging_call()));
    };
    std::shared_ptr<CompressedShare> compressed;
    if (parts_->cross && crossing.compression) {
      compressed =
          std::make_shared<CompressedShare>(CompressedShare{crossing, own, from(crossing.kept.residual, done)});
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

std::vector<Buffer> HierarchicalChains::blocks_inside(const std::vector<Buffer>& blocks, int cluster, int round) const {
  const Hierarchy& at = parts_->hierarchy;
  std::vector<Buffer> inside = no_data(blocks.front().dtype, static_cast<int>(at.members().size()));
  for (std::size_t index = 0; index < inside.size(); ++index)
    if (const auto rank = at.crossing_rank(cluster, static_cast<int>(index), round))
      inside[index] = blocks[static_cast<std::size_t>(*rank)];
  return inside;
}

std::vector<WorkPtr> HierarchicalChains::hand_over(PartCommunicator& inside, bool to_owners, const Buffer& own,
                                                   const std::function<Buffer(int)>& held) const {
  const Hierarchy& at = parts_->hierarchy;
  const auto message = [&](bool sends, const Buffer& block, int peer) {
    return sends ? inside.send(block, peer, 0, call()) : inside.recv(block, peer, 0, call());
  };
  if (!at.owns_share()) return one(message(to_owners, own, at.owner_index(at.rank())));
  std::vector<WorkPtr> works;
  for (int round = 1; round < at.rounds(at.cluster()); ++round)
    if (const auto rank = at.crossing_rank(at.cluster(), at.index(), round))
      works.push_back(message(!to_owners, held(*rank), at.index(*rank)));
  return works;
}

std::vector<Chain> HierarchicalChains::reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs,
                                                      ReduceOp op, const Crossing& crossing) const {
  const Hierarchy& at = parts_->hierarchy;
  const auto others = static_cast<std::size_t>(at.cluster_count() - 1);
  if (!crossing.compression && total_bytes(inputs) < together_bytes) return {small_reduce_scatter(output, inputs, op)};
  const std::size_t pieces = count_pieces(inputs);
  std::vector<Chain> chains;
  for (std::size_t number = 0; number < pieces; ++number) {
    const Run piece = equal_part({0, output.count}, pieces, number, output.dtype);
    const Buffer own = slice(output, piece);
    // By round and cluster: what goes to the rank whose block crosses with this one's, summed over this cluster; of
    // this cluster's ranks beyond the owners then over all.
    const auto partial = std::make_shared<std::vector<std::vector<Buffer>>>();
    Chain chain;
    chain[0] = [self = *this, &at, number, pieces, inputs, op, partial] {
      const std::vector<Buffer> blocks = pieces_of(inputs, pieces, number);
      std::vector<WorkPtr> works;
      for (int round = 0; round < at.rounds(); ++round)
        partial->push_back(no_data(blocks.front().dtype, at.cluster_count()));
      for (int k = 0; k < at.cluster_count(); ++k) {
        for (int round = 0; round < at.rounds(k); ++round) {
          std::vector<Buffer> inside = self.blocks_inside(blocks, k, round);
          Buffer& sum = (*partial)[static_cast<std::size_t>(round)][static_cast<std::size_t>(k)];
          const std::size_t count = inside[static_cast<std::size_t>(at.index())].count;
          if (count) sum = self.parts_->scratch->take(count, blocks.front().dtype);
          works.push_back(self.parts_->scatter->reduce_scatter(sum, std::move(inside), op, self.averaging_call()));
        }
      }
      return works;
    };
    if (crossing.compression) {
      const auto compressed = std::make_shared<CompressedScatter>(
          CompressedScatter{crossing, own, from(crossing.kept.residual, others * piece.begin)});
      chain[1] = [self = *this, compressed, partial] {
        return compressed->send(*self.parts_->cross, *self.parts_->scratch, std::move(partial->front()), self.call());
      };
      chain[2] = [compressed, cluster = at.cluster()] {
        compressed->finish(cluster);
        return std::vector<WorkPtr>();
      };
      chains.push_back(std::move(chain));
      continue;
    }
    if (parts_->cross)
      chain[1] = [self = *this, cluster = static_cast<std::size_t>(at.cluster()), own, partial, op] {
        std::vector<WorkPtr> works;
        for (std::size_t round = 0; round < partial->size(); ++round) {
          const std::vector<Buffer>& sums = (*partial)[round];
          works.push_back(self.parts_->cross->reduce_scatter(round == 0 ? own : sums[cluster], sums,
                                                             between_clusters(op), self.call()));
        }
        return works;
      };
    if (at.has_more_than_owners())
      chain[2] = [self = *this, &at, own, partial] {
        return self.hand_over(*self.parts_->gather, /*to_owners=*/false, own, [&](int rank) {
          return (*partial)[static_cast<std::size_t>(at.round(rank))][static_cast<std::size_t>(at.cluster())];
        });
      };
    chains.push_back(std::move(chain));
  }
  return chains;
}

Chain HierarchicalChains::small_reduce_scatter(const Buffer& output, const std::vector<Buffer>& inputs,
                                               ReduceOp op) const {
  const Hierarchy& at = parts_->hierarchy;
  const auto together = std::make_shared<const Together>(at, inputs, *parts_->scratch);
  Chain chain;
  chain[0] = [self = *this, inputs, op, together] {
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) copy(together->by_rank()[rank], inputs[rank]);
    return one(self.parts_->scatter->reduce_scatter(together->own(), together->by_index(), op, self.averaging_call()));
  };
  if (parts_->cross)
    chain[1] = [self = *this, &at, output, op, together] {
      const std::vector<Buffer>& sums = together->by_cluster();
      const Buffer& sum = at.has_more_than_owners() ? sums[static_cast<std::size_t>(at.cluster())] : output;
      return one(self.parts_->cross->reduce_scatter(sum, sums, between_clusters(op), self.call()));
    };
  if (at.has_more_than_owners())
    chain[2] = [self = *this, &at, output, together] {
      const std::vector<Buffer>& sums = together->by_rank();
      if (at.owns_share()) copy(output, sums[static_cast<std::size_t>(at.rank())]);
      return self.hand_over(*self.parts_->gather, /*to_owners=*/false, output,
                            [&](int rank) { return sums[static_cast<std::size_t>(rank)]; });
    };
  return chain;
}

Chain HierarchicalChains::small_all_gather(const std::vector<Buffer>& outputs, const Buffer& input) const {
  const Hierarchy& at = parts_->hierarchy;
  const auto together = std::make_shared<const Together>(at, outputs, *parts_->scratch);
  Chain chain;
  if (at.has_more_than_owners())
    chain[0] = [self = *this, input, together] {
      return self.hand_over(*self.parts_->scatter, /*to_owners=*/true, input,
                            [&](int rank) { return together->by_rank()[static_cast<std::size_t>(rank)]; });
    };
  if (parts_->cross)
    chain[1] = [self = *this, &at, input, together] {
      copy(together->by_rank()[static_cast<std::size_t>(at.rank())], input);
      const std::vector<Buffer>& blocks = together->by_cluster();
      return one(self.parts_->cross->all_gather(blocks, blocks[static_cast<std::size_t>(at.cluster())], self.call()));
    };
  chain[2] = [self = *this, together] {
    return one(self.parts_->gather->all_gather(together->by_index(), together->own(), self.call()));
  };
  chain[3] = [outputs, together] {
    for (std::size_t rank = 0; rank < outputs.size(); ++rank) copy(outputs[rank], together->by_rank()[rank]);
    return std::vector<WorkPtr>();
  };
  return chain;
}

std::vector<Chain> HierarchicalChains::all_gather(const std::vector<Buffer>& outputs, const Buffer& input,
                                                  const Crossing& crossing) const {
  const Hierarchy& at = parts_->hierarchy;
  std::vector<Chain> chains;
  if (!crossing.compression && total_bytes(outputs) < together_bytes) return {small_all_gather(outputs, input)};
  const std::size_t pieces = count_pieces(outputs);
  const auto pieces_left = std::make_shared<std::atomic<std::size_t>>(pieces);
  for (std::size_t number = 0; number < pieces; ++number) {
    const Run piece = equal_part({0, input.count}, pieces, number, input.dtype);
    const Buffer own = slice(input, piece);
    const std::vector<Buffer> blocks = pieces_of(outputs, pieces, number);
    std::vector<std::vector<Buffer>> crossed;  // by round, then by cluster
    for (int round = 0; at.owns_share() && round < at.rounds(); ++round) {
      crossed.push_back(no_data(input.dtype, at.cluster_count()));
      for (int k = 0; k < at.cluster_count(); ++k)
        if (const auto rank = at.crossing_rank(k, at.index(), round))
          crossed.back()[static_cast<std::size_t>(k)] = blocks[static_cast<std::size_t>(*rank)];
    }
    Chain chain;
    if (at.has_more_than_owners())
      chain[0] = [self = *this, own, blocks] {
        return self.hand_over(*self.parts_->scatter, /*to_owners=*/true, own,
                              [&](int rank) { return blocks[static_cast<std::size_t>(rank)]; });
      };
    std::shared_ptr<CompressedGather> compressed;
    if (crossing.compression) {
      compressed = std::make_shared<CompressedGather>(
          CompressedGather{crossing, crossed.front(), own, from(crossing.kept.residual, piece.begin), {}, pieces_left});
      for (std::size_t k = 0; crossing.kept.reference && k < crossed.front().size(); ++k)
        compressed->references.push_back(from(crossing.kept.reference, k * input.count + piece.begin));
      chain[1] = [self = *this, compressed] {
        return compressed->send(*self.parts_->cross, *self.parts_->scratch, self.call());
      };
    } else if (parts_->cross) {
      chain[1] = [self = *this, cluster = static_cast<std::size_t>(at.cluster()), crossed, own] {
        std::vector<WorkPtr> works;
        for (std::size_t round = 0; round < crossed.size(); ++round)
          works.push_back(
              self.parts_->cross->all_gather(crossed[round], round == 0 ? own : crossed[round][cluster], self.call()));
        return works;
      };
    }
    chain[2] = [self = *this, &at, blocks, own, compressed] {
      if (compressed) compressed->finish();
      const auto index = static_cast<std::size_t>(at.index());
      std::vector<WorkPtr> works;
      for (int k = 0; k < at.cluster_count(); ++k) {
        if (k == at.cluster()) {
          std::vector<Buffer> members;
          for (const int rank : at.members()) members.push_back(blocks[static_cast<std::size_t>(rank)]);
          const Buffer mine = at.owns_share() ? members[index] : own;
          works.push_back(self.parts_->gather->all_gather(std::move(members), mine, self.call()));
          continue;
        }
        for (int round = 0; round < at.rounds(k); ++round) {
          std::vector<Buffer> inside = self.blocks_inside(blocks, k, round);
          const Buffer mine = inside[index];
          works.push_back(self.parts_->gather->all_gather(std::move(inside), mine, self.call()));
        }
      }
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
