// CMA, cross memory attach: a part of a stream that the receiver copies out of the sender's memory itself
// (process_vm_readv; a shared buffer it reads where it is), in place of a copy into a ring by the one and out of it by
// the other.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/shared_buffer.hpp"

namespace holmes {

// What the two processes share of one direction; zero at first. One region is open at a time.
struct CmaRegion {
  // How far the receiver is in the stream, times 4, plus one of the following. The sender opens and withdraws, the
  // receiver does the rest; `busy` keeps the sender from withdrawing.
  static constexpr std::uint64_t shut = 0, open = 1, busy = 2, refused = 3;
  static constexpr unsigned what_bits = 2;
  alignas(64) std::atomic<std::uint64_t> state;
  // Written before it opens: where in the stream it ends, and the pieces of memory that it lies in, one after the
  // other. The byte at `position` of the stream is at `base + position` in the sender, up to a piece's own end. What is
  // as short as the header of a message is copied into the region itself, as far as there is room, and is at `base +
  // position` of `copies`: a system call for it would take a fifth of that for the message (128 KiB).
  struct Piece {
    std::atomic<std::uint64_t> base;
    std::atomic<std::uint64_t> end;
    std::atomic<bool> is_copied;
  };
  static constexpr std::size_t max_copied_bytes = 64;
  std::array<std::byte, max_pieces / 2 * max_copied_bytes> copies;
  std::atomic<std::uint64_t> end;
  Piece pieces[max_pieces];
  // Where the region is in a shared buffer, if it is to be read there; the byte at `position` at `offset + position` of
  // the buffer's data.
  BufferPlace place;
  // Who the sender is: its process number, and a word of its memory that no other process has there.
  std::int32_t pid;
  std::uint64_t token;
  std::uint64_t token_address;
};

// The sender's side. One thread at a time.
class CmaSender {
public:
  // Makes itself known.
  explicit CmaSender(CmaRegion& shared);

  bool is_open() const { return is_open_; }
  bool is_refused() const { return is_refused_; }
  // Shows the receiver the first `bytes` bytes of `pieces`, which begin at `position` of the stream: where they are in
  // a shared buffer, one piece then, or, without a place, by CMA. They may change only once the receiver is past them,
  // or the region is withdrawn. max_pieces at most.
  void open(std::uint64_t position, std::span<const iovec> pieces, std::size_t bytes, BufferPlace place = {});
  // Whether the region that was opened last is one in a shared buffer.
  bool is_in_place() const { return is_in_place_; }
  // Whether the receiver has copied any of what is open.
  bool is_begun() const {
    return shared_.state.load(std::memory_order_relaxed) != (begin_ << CmaRegion::what_bits | CmaRegion::open);
  }
  // How far the receiver is. Shuts the region where it is at the end, or cannot read (it refused: EPERM, another PID
  // namespace, memory of a device, no address space); the bytes behind the position then go another way.
  std::uint64_t position();
  std::uint64_t end() const { return end_; }
  // Shuts it where the receiver has copied nothing yet. Returns whether it did.
  bool withdraw();

private:
  CmaRegion& shared_;
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  bool is_open_ = false;
  bool is_in_place_ = false;
  bool is_refused_ = false;  // the region that was opened last
};

// The receiver's side. One thread at a time.
class CmaReceiver {
public:
  explicit CmaReceiver(CmaRegion& shared) : shared_(shared) {}

  // A number that changes when there may be something new.
  std::uint64_t state() const { return shared_.state.load(std::memory_order_seq_cst); }
  // Bytes that can be copied from `position` on.
  std::size_t available(std::uint64_t position) const;
  // Copies up to `bytes` of them into `pieces`, in order, and returns how many, fewer where a copied piece begins or
  // ends: 0 where the region is withdrawn, or cannot be read (which the sender is told). The sender may not go on
  // before `advance`.
  std::size_t copy(std::uint64_t position, std::span<const iovec> pieces, std::size_t bytes);
  // Whether copies out of shared buffers are written past the cache from now on.
  void set_bypass(bool bypass_cache) { bypasses_cache_ = bypass_cache; }
  // `bytes` of them where they are, in a shared buffer: nullptr where there are not so many, or not in one that this
  // process can map. The sender may not go on before `advance`; until then the same can be asked again.
  const std::byte* hold(std::uint64_t position, std::size_t bytes);
  // Tells the sender that CMA is of no use here.
  void refuse(std::uint64_t position);
  // The copied bytes are taken. Returns whether the region ends there.
  bool advance(std::uint64_t position);

private:
  // Of the region that this side keeps busy. Returns 0.
  std::size_t refuse_busy(std::uint64_t position);
  // `bytes` at `position` in the shared buffer that the region is in; nullptr where there is none.
  const std::byte* in_place(std::uint64_t position, std::size_t bytes);

  CmaRegion& shared_;
  PeerBuffers buffers_;
  bool bypasses_cache_ = false;
};

}  // namespace holmes
