// SliceReducer: reduces one block, slice by slice, from the contributions of all ranks; ReducingCollective: a
// collective in which ranks reduce a block each.
#pragma once

#include <algorithm>
#include <cstddef>

#include "holmes/collectives/collective.hpp"

namespace holmes {

// One rank's part of a buffer that is cut evenly.
struct Block {
  std::size_t begin_bytes = 0;
  std::size_t end_bytes = 0;
  std::size_t bytes() const { return end_bytes - begin_bytes; }
};

// Part `index` of `parts` equal ones of whole cache lines; the last ones may be shorter or empty.
inline Block equal_block(std::size_t total_bytes, int parts, int index) {
  constexpr std::size_t line_bytes = 64;
  const auto count = static_cast<std::size_t>(parts);
  const std::size_t share = ((total_bytes + count - 1) / count + line_bytes - 1) / line_bytes * line_bytes;
  const auto number = static_cast<std::size_t>(index);
  return {std::min(total_bytes, number * share), std::min(total_bytes, (number + 1) * share)};
}

// The same among all ranks but the root, which has none.
inline Block block_beside_root(std::size_t total_bytes, int size, int root, int rank) {
  if (rank == root) return {};
  return equal_block(total_bytes, size - 1, rank < root ? rank : rank - 1);
}

// Contributions of peers are either received into cache-sized staging or, where the channel can show them in place,
// never copied.
class SliceReducer {
public:
  // As destination: results stay in staging until they are sent, see next_result.
  static constexpr std::byte* in_staging = nullptr;
  // `own` is this rank's contribution to the block, `destination` (may be equal) gets the result.
  // `slice_bytes`: of one slice, a multiple of 64.
  // `source_total`: ranks that `avg` divides by. `bypass_cache`: the result is large and not read again soon.
  SliceReducer(Group& group, const std::byte* own, std::byte* destination, std::size_t count, DType dtype, ReduceOp op,
               int source_total, bool bypass_cache, std::size_t slice_bytes);
  // Takes staging from the group; call when the collective starts.
  void start();

  // Where the next contribution bytes of `peer` belong, given how many came; empty where staging is full, or in-place
  // peeking is due.
  iovec next_recv(int peer, std::size_t done_bytes) const;
  // True where the next slice of `peer` is to be peeked at.
  bool awaits_peek(int peer, std::size_t done_bytes) const;
  // Reduces the next slice if all contributions are there; `done_bytes[r]` is what came from rank r. Returns the bytes
  // of the slice, which must be counted as received for every peer in `peeked`, or 0.
  std::size_t reduce_next(const std::vector<std::size_t>& done_bytes);

  // --- where results are in staging ---
  // The next result bytes, given how many were sent.
  iovec next_result(std::size_t sent_bytes) const;
  // Whether the next result has a place.
  bool has_room(std::size_t sent_bytes) const {
    return reduced_bytes_ + next_bytes() <= sent_bytes + slots_per_peer * slice_bytes_;
  }

  std::size_t block_bytes() const { return count_ * size_bytes(dtype_); }
  std::size_t reduced_bytes() const { return reduced_bytes_; }
  bool is_done() const { return reduced_bytes_ == block_bytes(); }
  bool is_peeked(int peer) const { return peeked_[peer]; }

private:
  std::size_t next_bytes() const;  // of the slice that is due
  // The own slots hold results, where they are in staging.
  std::byte* slot(int peer, std::size_t offset_bytes) const;

  static constexpr std::size_t slots_per_peer = 2;

  Group& group_;
  const std::byte* own_;
  std::byte* destination_;
  std::size_t count_;
  DType dtype_;
  ReduceOp op_;
  int source_total_;
  bool bypass_cache_;
  std::size_t slice_bytes_;
  std::byte* staging_ = nullptr;
  std::size_t reduced_bytes_ = 0;
  std::vector<char> peeked_;          // by rank
  std::vector<const void*> sources_;  // of the slice being reduced, in rank order
};

class ReducingCollective : public Collective {
protected:
  ReducingCollective(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                     SliceReducer reducer);

  // How much of `peer`'s contribution to the own block has come. Absent: none may be taken now.
  virtual std::optional<std::size_t> contributed_bytes(int peer) const { return received_bytes(peer); }
  // Whether the next result has a place.
  virtual bool has_room() const { return true; }
  bool awaits_peek(int peer) const override;

  bool compute() final;
  bool is_computed() const final { return reducer_.is_done(); }

  SliceReducer reducer_;  // of this rank's block

private:
  std::vector<std::size_t> contributed_bytes_;  // by rank
};

}  // namespace holmes
