// Block: one rank's part of a buffer that is cut evenly.
#pragma once

#include <algorithm>
#include <cstddef>

namespace holmes {

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

}  // namespace holmes
