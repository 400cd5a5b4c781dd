// SharedBuffer: memory for tensors that the other ranks of a host read where it is, and that stays registered with an
// HCA. They map its memory file once, and what is sent out of it is then an ordinary copy, or is reduced in place, with
// no system call for each piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/lasting_memory.hpp"

namespace holmes {

// Where bytes are in a shared buffer, as another process finds them.
struct BufferPlace {
  std::uint64_t id = 0;      // of the buffer; 0: in none
  std::uint64_t offset = 0;  // of the first byte, in the buffer's data
  std::uint64_t buffer_bytes = 0;
  std::int32_t fd = -1;  // the buffer's memory file, in the process that owns it
};

class SharedBuffer {
public:
  // Zeros. Takes one file descriptor. Throws UsageError for no bytes at all, SystemError where there is no memory,
  // address space or descriptor. In a forked child it is ordinary memory: what the child writes is its own (what it has
  // not written changes with the parent's).
  explicit SharedBuffer(std::size_t bytes);
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;
  // Its memory is given back at once, also where others have it mapped still: what they would read are zeros.
  ~SharedBuffer();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Where these bytes are; an id of 0 where they are not, all of them, in one living buffer of this process.
  // Thread-safe.
  static BufferPlace place_of(const void* data, std::size_t bytes) noexcept;

private:
  UniqueFd fd_;
  std::byte* data_ = nullptr;  // a page with a header follows
  std::size_t bytes_ = 0;
  std::uint64_t id_ = 0;
  std::uint64_t epoch_ = 0;  // see fork_epoch
  std::optional<LastingMemory> lasting_;
};

// Buffers of one other process, mapped to read. One thread at a time.
class PeerBuffers {
public:
  PeerBuffers() = default;
  PeerBuffers(const PeerBuffers&) = delete;
  PeerBuffers& operator=(const PeerBuffers&) = delete;
  ~PeerBuffers();

  // `bytes` bytes at `place` in the process `pid`, or nullptr: it may not be looked into from here (another PID
  // namespace, another user, no address space left), or it has no such buffer any more.
  const std::byte* find(std::int32_t pid, const BufferPlace& place, std::size_t bytes);

private:
  struct Mapped {
    std::uint64_t id;
    const std::byte* base;
    std::size_t bytes;  // of the buffer
  };
  // nullptr where it cannot be.
  const Mapped* map(std::int32_t pid, const BufferPlace& place);
  static void unmap(const Mapped& mapped);
  // Those that are no more, and the oldest where there are too many.
  void tidy();

  std::vector<Mapped> mapped_;  // the latest first
};

}  // namespace holmes
