// LastingMemory: memory of this process that tells when it ends, so that who has made it known elsewhere (to an HCA)
// can leave it so until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace holmes {

class LastingMemory {
public:
  // Lives as long as this. Throws SystemError.
  LastingMemory(void* begin, std::size_t bytes);
  LastingMemory(const LastingMemory&) = delete;
  LastingMemory& operator=(const LastingMemory&) = delete;
  // Before the memory goes. In a forked child it is the parent's still.
  ~LastingMemory();

  // A block of it, or an id of 0.
  struct Block {
    std::uint64_t id = 0;
    std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };
  // The block that all of these bytes are in. None in a forked child. Thread-safe.
  static Block find(const void* data, std::size_t bytes) noexcept;

  // Calls `on_end` with the id of each block of this process that ends, as long as the watch lives. No block may be
  // made, asked for or ended in it.
  class EndWatch {
  public:
    explicit EndWatch(std::function<void(std::uint64_t id)> on_end);
    EndWatch(const EndWatch&) = delete;
    EndWatch& operator=(const EndWatch&) = delete;
    ~EndWatch();

  private:
    friend class LastingMemory;
    std::function<void(std::uint64_t id)> on_end_;
  };

private:
  Block block_;
};

}  // namespace holmes
