#include "holmes/comm/scratch_pool.hpp"

namespace holmes {

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
    self->free_.emplace(bytes, std::move(back));
  });
  return {data, count, dtype, std::move(owner)};
}

}  // namespace holmes
