// SliceReducer: reduces one block, slice by slice, from the contributions of all ranks. Contributions of peers are
// either received into cache-sized staging or, where the channel can show them in place, never copied.
#pragma once

#include "holmes/collectives/collective.hpp"

namespace holmes {

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

}  // namespace holmes
