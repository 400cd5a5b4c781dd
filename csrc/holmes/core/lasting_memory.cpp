#include "holmes/core/lasting_memory.hpp"

#include <atomic>
#include <mutex>
#include <vector>

#include "holmes/core/block_map.hpp"
#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

struct Blocks {
  struct Entry {
    std::size_t bytes;
    std::uint64_t id;
    std::uint64_t epoch;  // see fork_epoch
  };
  std::mutex mutex;
  BlockMap<Entry> entries;
  std::vector<LastingMemory::EndWatch*> watches;
  std::uint64_t last_id = 0;
  std::atomic<std::size_t> count{0};  // read without the lock: most processes have none
  void after_fork_in_child() {}
};

// Blocks may outlive static destruction.
Blocks& blocks() { return fork_registry<Blocks>(); }

}  // namespace

LastingMemory::LastingMemory(void* begin, std::size_t bytes) : block_{0, static_cast<std::byte*>(begin), bytes} {
  Blocks& all = blocks();
  std::lock_guard lock(all.mutex);
  block_.id = ++all.last_id;
  all.entries.emplace(reinterpret_cast<std::uintptr_t>(begin), Blocks::Entry{bytes, block_.id, fork_epoch()});
  all.count = all.entries.size();
}

LastingMemory::~LastingMemory() {
  Blocks& all = blocks();
  std::lock_guard lock(all.mutex);
  for (const EndWatch* watch : all.watches) watch->on_end_(block_.id);
  all.entries.erase(reinterpret_cast<std::uintptr_t>(block_.begin));
  all.count = all.entries.size();
}

LastingMemory::Block LastingMemory::find(const void* data, std::size_t bytes) noexcept {
  Blocks& all = blocks();
  if (all.count.load(std::memory_order_acquire) == 0) return {};
  std::lock_guard lock(all.mutex);
  const auto* const found = block_around(all.entries, data, bytes);
  if (!found) return {};
  return {found->second.id, reinterpret_cast<std::byte*>(found->first), found->second.bytes};
}

LastingMemory::EndWatch::EndWatch(std::function<void(std::uint64_t id)> on_end) : on_end_(std::move(on_end)) {
  Blocks& all = blocks();
  std::lock_guard lock(all.mutex);
  all.watches.push_back(this);
}

LastingMemory::EndWatch::~EndWatch() {
  Blocks& all = blocks();
  std::lock_guard lock(all.mutex);
  std::erase(all.watches, this);
}

}  // namespace holmes
