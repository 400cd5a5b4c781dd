#include "holmes/comm/joined.hpp"

#include <algorithm>
#include <cstring>

namespace holmes {

Joined::Joined(std::vector<Buffer> blocks, DType dtype) : blocks_(std::move(blocks)), dtype_(dtype) {
  for (const Buffer& block : blocks_) count_ += block.count;
}

Joined Joined::cut(const Run& run) const {
  std::vector<Buffer> pieces;
  std::size_t before = 0;
  for (const Buffer& block : blocks_) {
    const std::size_t begin = std::clamp(run.begin, before, before + block.count) - before;
    const std::size_t end = std::clamp(run.begin + run.count, before, before + block.count) - before;
    if (end > begin) pieces.push_back(slice(block, {begin, end - begin}));
    before += block.count;
  }
  return {std::move(pieces), dtype_};
}

Joined Joined::like(const Buffer& whole) const {
  std::vector<Buffer> pieces;
  std::size_t begin = 0;
  for (const Buffer& block : blocks_) {
    pieces.push_back(slice(whole, {begin, block.count}));
    begin += block.count;
  }
  return {std::move(pieces), dtype_};
}

bool Joined::is_one() const {
  const std::byte* end = nullptr;
  for (const Buffer& block : blocks_) {
    if (block.count == 0) continue;
    if (end && block.begin() != end) return false;
    end = block.begin() + block.bytes();
  }
  return true;
}

Buffer Joined::whole() const {
  const auto first = std::ranges::find_if(blocks_, [](const Buffer& block) { return block.count > 0; });
  if (first == blocks_.end()) return {nullptr, 0, dtype_, nullptr};
  return {first->data, count_, dtype_, first->owner};
}

Buffer Joined::place_for_one(ScratchPool& scratch) const { return is_one() ? whole() : scratch.take(count_, dtype_); }

Buffer Joined::in_one(ScratchPool& scratch) const {
  Buffer one = place_for_one(scratch);
  if (is_one()) return one;
  std::byte* to = one.begin();
  for (const Buffer& block : blocks_) {
    if (block.count > 0) std::memcpy(to, block.data, block.bytes());
    to += block.bytes();
  }
  return one;
}

void Joined::take_from(const Buffer& whole) const {
  if (is_one()) return;
  const std::byte* from = whole.begin();
  for (const Buffer& block : blocks_) {
    if (block.count > 0) std::memcpy(block.data, from, block.bytes());
    from += block.bytes();
  }
}

}  // namespace holmes
