// Joined: buffers that an operation moves as if they were one.
#pragma once

#include <vector>

#include "holmes/comm/hierarchical_chains.hpp"
#include "holmes/core/types.hpp"

namespace holmes {

class Joined {
public:
  Joined() = default;
  Joined(std::vector<Buffer> blocks, DType dtype);

  std::size_t count() const { return count_; }
  const std::vector<Buffer>& blocks() const { return blocks_; }
  // A run of the whole.
  Joined cut(const Run& run) const;
  // Blocks of the same lengths in `whole`, one after the other.
  Joined like(const Buffer& whole) const;
  // Where they lie one after the other, as one buffer. Of one made by `like`, which holds nothing else.
  Buffer whole() const;
  // What they hold, in one buffer: themselves, or a copy.
  Buffer in_one(ScratchPool& scratch) const;
  // As in_one, for `take_from` to take over what comes there.
  Buffer place_for_one(ScratchPool& scratch) const;
  void take_from(const Buffer& whole) const;

private:
  bool is_one() const;

  std::vector<Buffer> blocks_;
  DType dtype_ = DType::uint8;
  std::size_t count_ = 0;
};

}  // namespace holmes
