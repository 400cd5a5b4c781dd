// Hierarchy: which rank is where in a group that spans clusters, which part of a buffer is whose, and from how many
// bytes on the hierarchical form of an operation is the faster one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "holmes/comm/part_communicator.hpp"
#include "holmes/core/types.hpp"

namespace holmes {

// A run of elements of a buffer.
struct Run {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// `whole` in `parts` equal runs of whole cache lines; the last ones may be shorter or empty.
Run equal_part(const Run& whole, std::size_t parts, std::size_t index, DType dtype);

// Clusters are numbered as their first ranks are; within one, a rank's index is its place in rank order. Immutable.
class Hierarchy {
public:
  // `cluster_of[r]` is any number that the ranks of r's cluster have in common.
  Hierarchy(const std::vector<int>& cluster_of, int rank);

  int rank() const { return rank_; }
  int cluster_count() const { return static_cast<int>(members_.size()); }
  int cluster() const { return cluster(rank_); }  // this rank's
  int cluster(int rank) const { return cluster_[static_cast<std::size_t>(rank)]; }
  int index() const { return index(rank_); }
  int index(int rank) const { return index_[static_cast<std::size_t>(rank)]; }
  // Ranks of a cluster, by index.
  const std::vector<int>& members(int cluster) const { return members_[static_cast<std::size_t>(cluster)]; }
  const std::vector<int>& members() const { return members(cluster()); }
  // The ranks of this rank's index, by cluster. Only where owns_share().
  std::vector<int> counterparts() const;

  // The first ranks of every cluster own a share of what crosses: as many as the smallest cluster has.
  bool owns_share() const { return index() < share_count_; }
  bool has_equal_clusters() const { return equal_; }

  int share_count() const { return share_count_; }

  // Where every rank has a block of its own, the blocks of the other ranks cross with those of the owners: of the rank
  // whose index is theirs modulo the number of owners, in rounds.
  int rounds(int cluster) const;
  int rounds() const { return rounds_; }  // of the largest cluster
  int round(int rank) const { return index(rank) / share_count_; }
  // Whether blocks of this rank's cluster cross with others'.
  bool has_more_than_owners() const { return rounds(cluster()) > 1; }
  int owner_index(int rank) const { return index(rank) % share_count_; }
  // The rank of `cluster` whose block crosses with the owner of this index in this round; none: there is none.
  std::optional<int> crossing_rank(int cluster, int owner_index, int round) const;
  // Whether blocks of so many elements, by rank, are fewer on the busiest rank's way between the clusters than if each
  // went to or came from every rank there, by more than their rounds cost.
  bool saves_crossings(const std::vector<Buffer>& blocks) const;
  // Whether going over the hierarchy can save anything at all.
  bool is_useful() const { return members_.size() > 1 && members_.size() < cluster_.size(); }

  // The share of the rank with this index; empty for the ones that own none.
  Run share(const Run& whole, int index, DType dtype) const;

private:
  int rank_;
  std::vector<int> cluster_;  // by rank
  std::vector<int> index_;    // by rank
  std::vector<std::vector<int>> members_;
  int share_count_ = 0;
  int rounds_ = 1;
  bool equal_ = true;
};

// Smaller pieces cost more latency than their overlap gains.
inline constexpr std::size_t min_piece_bytes = 256 * 1024;

// So little that nothing overlaps: an operation of so many bytes is of one piece.
constexpr bool is_one_piece(std::uint64_t bytes) { return bytes < 2 * min_piece_bytes; }
// Cuts a buffer so that the phases of consecutive pieces overlap.
std::vector<Run> cut_into_pieces(std::size_t count, DType dtype);
// In how many pieces the ranks' blocks are cut: as the largest.
std::size_t count_pieces(const std::vector<Buffer>& blocks);

// A run of a buffer, as a buffer.
Buffer slice(const Buffer& whole, const Run& run);

// Collective over `flat`: what the ranks that were given a value say. Throws UsageError on all ranks where they differ.
std::optional<std::uint64_t> agree_given_bytes(Communicator& flat, const std::optional<std::uint64_t>& given);

// Collective over `flat`: times an all_reduce of growing sizes in both forms until `hierarchical` (which is given what
// to reduce and blocks) wins or the time for it is spent; then goes by the trend. The same on all ranks. Returns
// never_hierarchical where it does not win.
std::uint64_t measure_hierarchical_min_bytes(PartCommunicator& flat,
                                             const std::function<void(const Buffer&)>& hierarchical, Duration timeout);

}  // namespace holmes
