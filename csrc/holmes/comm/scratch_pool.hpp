// ScratchPool: memory for partial results, kept from one operation to the next.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "holmes/core/types.hpp"

namespace holmes {

// Holds as many blocks as were in use at once. Thread-safe.
class ScratchPool : public std::enable_shared_from_this<ScratchPool> {
public:
  // Uninitialised memory that comes back when the buffer's last owner goes.
  Buffer take(std::size_t count, DType dtype);

private:
  using Block = std::unique_ptr<std::byte[]>;

  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_;  // by bytes
};

}  // namespace holmes
