// BruckSteps: who sends how much to whom in Bruck's steps (see Bruck).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>

namespace holmes {

// Slot j of a rank holds the block of the rank j above it. In step k a rank sends its first slots to the rank 2^k below
// it, and gets as many, from slot 2^k on, from the rank 2^k above.
struct BruckSteps {
  int rank;
  int size;

  int count() const { return std::bit_width(static_cast<unsigned>(size - 1)); }
  int to(int step) const { return (rank - (1 << step) + size) % size; }
  int from(int step) const { return (rank + (1 << step)) % size; }
  static std::size_t first_slot(int step) { return std::size_t{1} << step; }
  std::size_t slots(int step) const {
    return std::min(first_slot(step), static_cast<std::size_t>(size) - first_slot(step));
  }
  // Bytes that are sent / received in a step, where slot j begins at `begin[j]`.
  std::size_t sent_bytes(std::span<const std::size_t> begin, int step) const { return begin[slots(step)]; }
  std::size_t received_bytes(std::span<const std::size_t> begin, int step) const {
    return begin[first_slot(step) + slots(step)] - begin[first_slot(step)];
  }
  // The step in which this rank sends to / receives from `peer`; -1: in none.
  int step_to(int peer) const { return step_of((rank - peer + size) % size); }
  int step_from(int peer) const { return step_of((peer - rank + size) % size); }
  std::size_t slot_of(int of_rank) const { return static_cast<std::size_t>((of_rank - rank + size) % size); }

private:
  // The step that bridges `distance` ranks: k for 2^k, -1 for others.
  static int step_of(int distance) {
    const auto value = static_cast<unsigned>(distance);
    // Not std::has_single_bit, which calls a library where the processor may lack an instruction that counts bits.
    return value != 0 && (value & (value - 1)) == 0 ? std::countr_zero(value) : -1;
  }
};

}  // namespace holmes
