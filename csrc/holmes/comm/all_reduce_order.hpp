// AllReduceOrder: whether an all_reduce sends contributions and results in turns, or all contributions first. In turns,
// a result is sent while the caches hold it. A channel that lets the receiver copy out of the sender's memory is faster
// with long runs. Measured, by size; all ranks decide alike.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "holmes/transport/window_choice.hpp"

namespace holmes {

class AllReduceOrder {
public:
  // What a rank tells the others in each all_reduce.
  static constexpr std::uint64_t can = 1;      // its channels have windows, all of them
  static constexpr std::uint64_t prefers = 2;  // contributions first took less time, for this size

  // Of the next one, of `bytes`.
  bool contributions_first(std::size_t bytes) const;
  // This rank's vote in it. `all_windows`: its channels have windows; `always`: they are not to be measured.
  std::uint64_t vote(std::size_t bytes, bool all_windows, bool always) const;
  // It ended, `seconds` after all ranks were there (0: unknown). `votes`: what all ranks agree on.
  void ended(std::size_t bytes, double seconds, std::uint64_t votes);

private:
  struct Size {
    unsigned calls = 0;
    bool is_better = false;  // contributions first
    CopyCost in_turns;
    CopyCost contributions_first;
  };
  std::array<Size, 65> sizes_;  // by number of bits
  bool can_ = false;
};

}  // namespace holmes
