// Blocks of this process's memory by the addresses where they begin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "holmes/core/fork.hpp"

namespace holmes {

// `Entry` has `bytes`, and the `epoch` (see fork_epoch) in which the block was made.
template <class Entry>
using BlockMap = std::map<std::uintptr_t, Entry>;

// The block that all of these bytes are in; null where there is none, or it is the parent's of a forked child.
template <class Entry>
const typename BlockMap<Entry>::value_type* block_around(const BlockMap<Entry>& blocks, const void* data,
                                                         std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  auto found = blocks.upper_bound(address);
  if (found == blocks.begin()) return nullptr;
  const auto& [begin, entry] = *--found;
  const std::size_t offset = address - begin;
  if (offset > entry.bytes || bytes > entry.bytes - offset || entry.epoch != fork_epoch()) return nullptr;
  return &*found;
}

}  // namespace holmes
