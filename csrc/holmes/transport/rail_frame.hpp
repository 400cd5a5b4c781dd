// RailFrame: what travels on a rail (a header, then the bytes of one chunk of the stream), and the memory for it,
// in use (ReorderBuffer) and not (FramePool).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "holmes/core/crc32c.hpp"

namespace holmes {

// A chunk: long enough that its header and system call cost little, short enough for the cache and for a fair share
// between rails. Slow rails get shorter ones.
inline constexpr std::size_t max_chunk_bytes = 128 * 1024;
// Chunks a sender may be ahead of the first that the peer's kernel has not acknowledged. The receiver holds as many out
// of order: even when a lost rail's chunks are sent again behind later ones, nothing waits for room.
inline constexpr std::uint64_t window_chunks = 512;

// Values are part of the wire protocol.
enum class FrameKind : std::uint8_t {
  data = 1,
  retire = 2,  // no payload: the sender no longer uses `rail`, nor should the peer
};

// In host byte order (little-endian machines only; checked by the handshake).
struct alignas(64) FrameHeader {
  static constexpr std::uint16_t right_magic = 0x4852;  // "RH"
  std::uint16_t magic = right_magic;
  FrameKind kind = FrameKind::data;
  std::uint8_t rail = 0;
  std::uint32_t bytes = 0;     // of payload, at most max_chunk_bytes
  std::uint64_t sequence = 0;  // number of the chunk in the stream
  // To a cache line: copies of misaligned payload into the socket take twice the time (measured).
  std::uint8_t unused[44] = {};
  std::uint32_t crc = 0;  // of all before it: a wrong length or number would be waited for, and for ever

  std::uint32_t right_crc() const {
    return crc32c(0, reinterpret_cast<const std::byte*>(this), offsetof(FrameHeader, crc));
  }
};
static_assert(sizeof(FrameHeader) == 64);

// A frame in memory, as it is on the wire.
struct Frame {
  FrameHeader header;
  std::array<std::byte, max_chunk_bytes> payload;

  const std::byte* wire() const { return reinterpret_cast<const std::byte*>(this); }
  std::size_t wire_bytes() const { return sizeof(FrameHeader) + header.bytes; }
};
static_assert(offsetof(Frame, payload) == sizeof(FrameHeader));

// A frame and where its payload lies in the sender's stream.
struct Chunk {
  std::unique_ptr<Frame> frame;
  std::uint64_t begin_bytes = 0;
  bool is_copied = false;  // another rail has it too, and will have delivered it sooner
};

// Frames for reuse, the latest (still in the cache) first. Keeps a few MiB, gives the rest back.
class FramePool {
public:
  std::unique_ptr<Frame> take() {
    if (free_.empty()) return std::unique_ptr<Frame>(new Frame);  // payload not set: it is written before it is read
    auto frame = std::move(free_.back());
    free_.pop_back();
    frame->header = {};
    return frame;
  }
  void give(std::unique_ptr<Frame> frame) {
    constexpr std::size_t kept = 32;
    if (frame && free_.size() < kept) free_.push_back(std::move(frame));
  }

private:
  std::vector<std::unique_ptr<Frame>> free_;
};

// First in, first out, without allocation once it has grown.
class ChunkQueue {
public:
  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }
  Chunk& operator[](std::size_t index) { return slots_[(first_ + index) & (slots_.size() - 1)]; }
  const Chunk& operator[](std::size_t index) const { return slots_[(first_ + index) & (slots_.size() - 1)]; }
  void push_back(Chunk chunk) {
    if (count_ == slots_.size()) grow();
    (*this)[count_++] = std::move(chunk);
  }
  Chunk pop_front() {
    Chunk chunk = std::move(slots_[first_]);
    first_ = (first_ + 1) & (slots_.size() - 1);
    --count_;
    return chunk;
  }

private:
  void grow() {
    std::vector<Chunk> larger(slots_.empty() ? 16 : slots_.size() * 2);  // a power of two
    for (std::size_t i = 0; i < count_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    first_ = 0;
  }

  std::vector<Chunk> slots_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

// Chunks of a stream that came before their turn. Holds those numbered less than `window_chunks` after the one that is
// due. Memory of a chunk is its frame; the buffer itself is a table of pointers.
class ReorderBuffer {
public:
  // Number of the chunk that is due.
  std::uint64_t next() const { return next_; }
  bool has_room_for(std::uint64_t sequence) const { return sequence - next_ < window_chunks; }  // not for past ones
  bool is_known(std::uint64_t sequence) const { return sequence < next_ || slot(sequence) != nullptr; }

  // A complete chunk that has room; returns false (and leaves the frame) where it is known already.
  bool insert(std::unique_ptr<Frame>& frame) {
    const std::uint64_t sequence = frame->header.sequence;
    if (is_known(sequence)) return false;
    slots_[sequence % window_chunks] = std::move(frame);
    return true;
  }
  // The due chunk, null while it is not here.
  const Frame* due() const { return slot(next_); }
  // Goes on to the next chunk; returns the frame of the old one, if it was here.
  std::unique_ptr<Frame> advance() { return std::move(slots_[next_++ % window_chunks]); }

private:
  const Frame* slot(std::uint64_t sequence) const {
    const Frame* frame = slots_[sequence % window_chunks].get();
    return frame != nullptr && frame->header.sequence == sequence ? frame : nullptr;
  }

  std::vector<std::unique_ptr<Frame>> slots_ = std::vector<std::unique_ptr<Frame>>(window_chunks);
  std::uint64_t next_ = 0;
};

}  // namespace holmes
