#include "holmes/transport/rdma/buffer_regions.hpp"

#include <atomic>

#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

// Of all HCAs.
std::atomic<std::size_t> registered_bytes{0};

// Takes them, where they fit.
bool take(std::size_t bytes) {
  constexpr std::size_t share = 4;
  const std::size_t before = registered_bytes.fetch_add(bytes);
  const auto most = verbs::lockable_bytes();
  if (!most || before + bytes <= *most / share) return true;
  registered_bytes -= bytes;
  return false;
}

}  // namespace

BufferRegions::BufferRegions(const verbs::Library& library, verbs::ProtectionDomain* domain)
    : library_(library), domain_(domain), epoch_(fork_epoch()), watch_([this](std::uint64_t id) { end(id); }) {}

BufferRegions::~BufferRegions() = default;

SharedRegion BufferRegions::find(const iovec& memory) {
  const LastingMemory::Block block = LastingMemory::find(memory.iov_base, memory.iov_len);
  if (block.id == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find(block.id);
  if (known != regions_.end()) return known->second;
  return regions_[block.id] = register_block(block);
}

SharedRegion BufferRegions::register_block(const LastingMemory::Block& block) {
  const std::size_t bytes = block.bytes;
  if (!take(bytes)) return nullptr;
  verbs::MemoryRegion* const region =
      library_.register_memory(domain_, block.begin, bytes, verbs::access_local_write | verbs::access_remote_read);
  if (!region) {
    registered_bytes -= bytes;
    return nullptr;
  }
  return {region, [&library = library_, epoch = epoch_, bytes](verbs::MemoryRegion* ended) {
            if (epoch != fork_epoch()) return;  // it is the parent's
            library.deregister_memory(ended);
            registered_bytes -= bytes;
          }};
}

void BufferRegions::end(std::uint64_t id) {
  if (epoch_ != fork_epoch()) return;  // another thread of the parent may have held the mutex
  const std::lock_guard lock(mutex_);
  regions_.erase(id);
}

}  // namespace holmes
