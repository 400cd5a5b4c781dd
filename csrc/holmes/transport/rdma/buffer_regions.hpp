// BufferRegions: blocks of memory that tell of their end (see LastingMemory: shared buffers, page-locked rings) and are
// registered with an HCA, each once, whole, until then. Of other memory nothing tells when it is unmapped: that is
// registered for one message at a time.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "holmes/core/lasting_memory.hpp"
#include "holmes/transport/rdma/library.hpp"

namespace holmes {

using SharedRegion = std::shared_ptr<const verbs::MemoryRegion>;

// Thread-safe.
class BufferRegions {
public:
  BufferRegions(const verbs::Library& library, verbs::ProtectionDomain* domain);
  BufferRegions(const BufferRegions&) = delete;
  BufferRegions& operator=(const BufferRegions&) = delete;
  ~BufferRegions();

  // Of the block that all of `memory` is in. Null where that is none, it cannot be registered, or all that are would
  // take more than a quarter of the memory that this process may lock: rings of other communicators need some.
  SharedRegion find(const iovec& memory);

private:
  void end(std::uint64_t id);
  SharedRegion register_block(const LastingMemory::Block& block);

  const verbs::Library& library_;
  verbs::ProtectionDomain* domain_;
  std::uint64_t epoch_;
  std::mutex mutex_;
  std::map<std::uint64_t, SharedRegion> regions_;  // by block; null: it was refused
  LastingMemory::EndWatch watch_;                  // the last: it calls end()
};

}  // namespace holmes
