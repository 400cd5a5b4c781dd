#include "holmes/transport/rdma/buffer_regions.hpp"

#include <sys/resource.h>

#include <atomic>

#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

// Of all HCAs.
std::atomic<std::size_t> registered_bytes{0};

// Takes them, where they fit.
bool take(std::size_t bytes) {
  constexpr rlim_t share = 4;
  const std::size_t before = registered_bytes.fetch_add(bytes);
  rlimit limit{};
  const bool is_limited = ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  if (!is_limited || before + bytes <= limit.rlim_cur / share) return true;
  registered_bytes -= bytes;
  return false;
}

}  // namespace

BufferRegions::BufferRegions(const verbs::Library& library, verbs::ProtectionDomain* domain)
    : library_(library), domain_(domain), epoch_(fork_epoch()), watch_([this](std::uint64_t id) { end(id); }) {}

BufferRegions::~BufferRegions() = default;

SharedRegion BufferRegions::find(const iovec& memory) {
  const BufferPlace place = SharedBuffer::place_of(memory.iov_base, memory.iov_len);
  if (place.id == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find(place.id);
  if (known != regions_.end()) return known->second;
  return regions_[place.id] = register_buffer(place, memory);
}

SharedRegion BufferRegions::register_buffer(const BufferPlace& place, const iovec& memory) {
  const std::size_t bytes = place.buffer_bytes;
  if (!take(bytes)) return nullptr;
  std::byte* const begin = static_cast<std::byte*>(memory.iov_base) - place.offset;
  verbs::MemoryRegion* const region =
      library_.register_memory(domain_, begin, bytes, verbs::access_local_write | verbs::access_remote_read);
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
