// BufferRegions: shared buffers (see SharedBuffer) that are registered with an HCA, each once, whole, until it ends. Of
// other memory nothing tells when it is unmapped: that is registered for one message at a time.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "holmes/transport/rdma/library.hpp"
#include "holmes/transport/shared_buffer.hpp"

namespace holmes {

using SharedRegion = std::shared_ptr<const verbs::MemoryRegion>;

// Thread-safe.
class BufferRegions {
public:
  BufferRegions(const verbs::Library& library, verbs::ProtectionDomain* domain);
  BufferRegions(const BufferRegions&) = delete;
  BufferRegions& operator=(const BufferRegions&) = delete;
  ~BufferRegions();

  // Of the buffer that all of `memory` is in. Null where that is none, it cannot be registered, or all that are would
  // take more than a quarter of the memory that this process may lock: rings of other communicators need some.
  SharedRegion find(const iovec& memory);

private:
  void end(std::uint64_t id);
  SharedRegion register_buffer(const BufferPlace& place, const iovec& memory);

  const verbs::Library& library_;
  verbs::ProtectionDomain* domain_;
  std::uint64_t epoch_;
  std::mutex mutex_;
  std::map<std::uint64_t, SharedRegion> regions_;  // by buffer; null: it was refused
  SharedBuffer::EndWatch watch_;                   // the last: it calls end()
};

}  // namespace holmes
