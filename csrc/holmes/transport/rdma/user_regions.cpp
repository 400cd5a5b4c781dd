#include "holmes/transport/rdma/user_regions.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "holmes/core/fork.hpp"
#include "holmes/core/types.hpp"

namespace holmes {
namespace {

constexpr std::size_t most_entries = 256;

// Of all HCAs.
std::atomic<std::size_t> kept_bytes{0};

std::size_t most_bytes() {
  static const std::size_t memory_bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * page_bytes();
  return std::min(verbs::lockable_bytes().value_or(SIZE_MAX) / 8, memory_bytes / 4);
}

std::uintptr_t begin_of(const iovec& memory) { return reinterpret_cast<std::uintptr_t>(memory.iov_base); }

}  // namespace

UserRegions::UserRegions(const verbs::Library& library, verbs::ProtectionDomain* domain)
    : library_(library), domain_(domain), epoch_(fork_epoch()) {}

UserRegions::~UserRegions() {
  if (epoch_ == fork_epoch())
    for (const Entry& entry : entries_) unmap_watch::release(entry.ticket);
}

SharedRegion UserRegions::find(const iovec& memory) {
  if (epoch_ != fork_epoch() || !library_.survives_fork()) return nullptr;
  const std::lock_guard lock(mutex_);
  const std::uintptr_t begin = begin_of(memory);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (begin < entry.begin || begin + memory.iov_len > entry.end) continue;
    if (unmap_watch::is_whole(entry.ticket)) {
      entry.used = ++clock_;
      return entry.region;
    }
    erase(i--);
  }
  Seen* const before = seen(memory);
  if (!before) {
    seen_[next_seen_] = {begin, memory.iov_len, false};
    next_seen_ = (next_seen_ + 1) % seen_.size();
    return nullptr;
  }
  if (before->is_refused || !make_room(memory.iov_len)) return nullptr;
  SharedRegion region = add(memory);
  before->is_refused = region == nullptr;
  return region;
}

UserRegions::Seen* UserRegions::seen(const iovec& memory) {
  const auto found = std::ranges::find_if(
      seen_, [&](const Seen& one) { return one.begin == begin_of(memory) && one.bytes == memory.iov_len; });
  return found == seen_.end() ? nullptr : &*found;
}

SharedRegion UserRegions::add(const iovec& memory) {
  const std::size_t bytes = memory.iov_len;
  // Watched first: what becomes of it while it is registered counts too.
  const auto ticket = unmap_watch::watch(memory.iov_base, bytes);
  if (!ticket) return nullptr;
  verbs::MemoryRegion* const made =
      library_.register_memory(domain_, memory.iov_base, bytes, verbs::access_local_write | verbs::access_remote_read);
  if (!made) {
    unmap_watch::release(*ticket);
    return nullptr;
  }
  kept_bytes += bytes;
  SharedRegion region(made, [&library = library_, epoch = epoch_, bytes](verbs::MemoryRegion* ended) {
    if (epoch != fork_epoch()) return;  // it is the parent's
    library.deregister_memory(ended);
    kept_bytes -= bytes;
  });
  entries_.push_back({begin_of(memory), begin_of(memory) + bytes, *ticket, ++clock_, region});
  return region;
}

bool UserRegions::give_back() {
  if (epoch_ != fork_epoch()) return false;
  const std::lock_guard lock(mutex_);
  const std::size_t before = entries_.size();
  for (std::size_t i = before; i-- > 0;)
    if (entries_[i].region.use_count() == 1) erase(i);
  return entries_.size() < before;
}

// Ends what is gone or was used longest ago, and is not in use now, until `bytes` more may be.
bool UserRegions::make_room(std::size_t bytes) {
  const std::size_t most = most_bytes();
  if (bytes > most) return false;
  for (std::size_t i = entries_.size(); i-- > 0;)
    if (!unmap_watch::is_whole(entries_[i].ticket)) erase(i);
  while (entries_.size() >= most_entries || kept_bytes + bytes > most) {
    std::size_t oldest = entries_.size();
    for (std::size_t i = 0; i < entries_.size(); ++i)
      if (entries_[i].region.use_count() == 1 &&
          (oldest == entries_.size() || entries_[i].used < entries_[oldest].used))
        oldest = i;
    if (oldest == entries_.size()) return false;
    erase(oldest);
  }
  return true;
}

void UserRegions::erase(std::size_t index) {
  unmap_watch::release(entries_[index].ticket);
  std::swap(entries_[index], entries_.back());
  entries_.pop_back();
}

}  // namespace holmes
