// Channel: a full-duplex byte stream to one peer. TCP and shared memory implement it; collectives know nothing else.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "holmes/core/connection_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// The peer closed the stream, or the system failed it. Internal: the communicator turns it into the error that names
// rank, host and NIC, after asking the control connections what happened.
struct StreamClosed {
  int peer = -1;
  int system_errno = 0;  // 0: orderly end of stream; EFAULT: memory of this process is not there, the stream is
};

// How pieces travel between two ranks of one host: through a ring in shared memory; by a copy out of the sender's
// memory (CMA, see CmaRegion); or what is in a shared buffer (see SharedBuffer) read where it is, all else through the
// ring.
enum class CopyWay : std::uint8_t { ring, cma, in_place };
inline constexpr int copy_way_count = 3;

// Two ranks that exchange much go at one pace, this far apart at most (measured: 128 KiB costs throughput on loopback,
// 512 KiB lets flows that share a link drift apart).
inline constexpr std::size_t min_lead_bytes = 256 * 1024;

// Bytes one call moves at most: enough to amortise it, little enough to stay in the L2 cache and to be fair between
// peers (measured over TCP: 256 KiB to 512 KiB best, 64 KiB 10 to 35 % slower).
inline constexpr std::size_t max_call_bytes = 512 * 1024;
// And pieces, for a system call.
inline constexpr std::size_t max_pieces = 8;

inline std::size_t total_bytes(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

// So few bytes between two ranks are moved at once, by the thread that calls (see Channel's calls of that name,
// ShortCall and ShortMessage).
inline constexpr std::size_t most_short_bytes = 2048;
// All of a short call can go now, or is there, and nothing is before it; that may still come; or it never comes the
// short way, however long one looks.
enum class ShortState { ready, awaited, barred };

// Non-blocking. One thread at a time (the communicator's driver), counters excepted.
class Channel {
public:
  explicit Channel(int peer) : peer_(peer) {}
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  virtual ~Channel() = default;

  int peer() const { return peer_; }
  // Sends from `pieces`, in order, what fits now. Returns the bytes taken, 0 where it would block. Throws StreamClosed.
  virtual std::size_t try_send(std::span<const iovec> pieces) = 0;
  // Receives into `pieces`, in order, what is there. Returns the bytes written, 0 where it would block. Throws
  // StreamClosed.
  virtual std::size_t try_recv(std::span<const iovec> pieces) = 0;

  // As try_send, of what the peer has no use for yet: it may stay here until more is sent, or send_kept. That does not
  // throw: a stream that is closed ends what uses it next.
  virtual std::size_t try_send_later(std::span<const iovec> pieces) { return try_send(pieces); }
  virtual bool keeps_any() const { return false; }
  virtual void send_kept() {}

  // As try_send and try_recv, of memory that stays as it is until all of it has gone, or has come, or the stream was
  // shut down (of what is sent, the last piece does): the transport may keep it in use after it has returned, and is
  // then to be called with what is left of it again. `lasting_bytes`: from so many on that is worth it.
  virtual std::size_t lasting_bytes() const { return SIZE_MAX; }
  virtual std::size_t try_send_lasting(std::span<const iovec> pieces) { return try_send(pieces); }
  virtual std::size_t try_recv_lasting(iovec piece) { return try_recv({&piece, 1}); }
  // As try_send_lasting, the last piece being part of a block that the transport may keep known (see LastingMemory):
  // that is worth it from fewer bytes on.
  virtual std::size_t try_send_staged(std::span<const iovec> pieces) { return try_send_lasting(pieces); }

  // Whether the two following may be called for this GPU's memory. Throws UsageError where it was asked for and cannot
  // be had.
  virtual bool takes_device_memory(int /*gpu*/) const { return false; }
  // As try_send_lasting and try_recv_lasting, of a GPU's memory where it is, which no processor touches: what cannot go
  // so is refused, to be sent (tried to receive) from host memory.
  struct DeviceMove {
    std::size_t bytes = 0;
    bool is_refused = false;
  };
  virtual DeviceMove try_send_device(iovec /*memory*/, int /*gpu*/) { return {0, true}; }
  virtual DeviceMove try_recv_device(iovec /*memory*/, int /*gpu*/) { return {0, true}; }

  // How far this side may send ahead of what the peer has sent, so that no path runs dry while both go at one pace.
  virtual std::size_t lead_bytes() { return min_lead_bytes; }
  // Whether it goes at one at all: nothing waits in between where the peer copies out of this side's memory.
  virtual bool keeps_pace() const { return true; }

  // Whether pieces can go by CMA.
  virtual CmaUse cma_use() const { return CmaUse::never; }
  // Whether ranks may read shared buffers in place.
  virtual bool may_read_in_place() const { return false; }
  // How pieces go from now on; absent: as the channel measures. `bypass_cache`: copies of what is read in place are
  // written past the cache.
  virtual void set_way(std::optional<CopyWay> /*way*/, bool /*bypass_cache*/) {}
  // Whether this rank waits for messages, from anyone, while it sends what is next.
  virtual void set_receives_meanwhile(bool /*receives*/) {}
  // Whether the peer could not read a shared buffer since this was asked last.
  virtual bool was_refused_in_place() { return false; }

  // Largest number of bytes try_peek can give; 0 where the transport has none.
  virtual std::size_t max_peek_bytes() const { return 0; }
  // Received bytes in place, without a copy: `bytes` contiguous ones, or null while fewer are there. Valid until
  // `consume`.
  virtual const std::byte* try_peek(std::size_t /*bytes*/) { return nullptr; }
  virtual void consume(std::size_t /*bytes*/) {}

  // Few bytes at a time. None of these throws. `in_a_row`: how many are to be sent one by one that could go together.
  virtual bool takes_short(std::size_t /*in_a_row*/ = 1) const { return false; }
  // What send_short may be given now.
  virtual std::size_t short_room_bytes() { return 0; }
  // Takes all of it, from shared memory always; what it does not take, try_send is to be given next. `later`: as
  // try_send_later. Returns the bytes taken.
  virtual std::size_t send_short(std::span<const iovec> /*pieces*/, bool /*later*/ = false) { return 0; }
  // What is there in one piece, valid until `consume`; where looking takes a system call, looked for where fewer than
  // `wanted` bytes are here. Or whether what comes next is there, and only try_recv can give it.
  struct ShortView {
    std::span<const std::byte> bytes{};
    bool is_elsewhere = false;
  };
  virtual ShortView view_short(std::size_t /*wanted*/) { return {}; }
  // As try_peek, of what view_short gives. `asks`: whether it is worth a system call.
  const std::byte* peek_short(std::size_t bytes, bool asks = true) {
    const ShortView view = view_short(asks ? bytes : 0);
    return view.bytes.size() < bytes ? nullptr : view.bytes.data();
  }

  // Whether the stream itself tells that the peer is gone, after the last byte. Where not, the control connection does.
  virtual bool tells_end() const { return true; }

  // Whether the peer's system acknowledges nothing of what this one has sent, and sends again: the path is cut, or was
  // until just now. (A process that is stopped still has a system that acknowledges.)
  virtual bool is_unanswered() const { return false; }

  // Before prepare_wait: at least so many bytes will come, whatever this side does; no need to be woken for fewer.
  virtual void set_low_water(std::size_t /*bytes*/) {}
  // Before blocking: asks to be woken when the stream can be received from / sent to, through descriptors appended to
  // `fds`. Returns false where it is ready already (then do not block).
  virtual bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) = 0;
  // When to wait no longer, though nothing is ready, but to prepare for it again; absent: never.
  virtual std::optional<Clock::time_point> next_look() const { return std::nullopt; }
  // After blocking (or not): withdraws what prepare_wait asked for. `asked`: the same `fds`, as poll answered them, or
  // with nothing ready where it was not called; empty: they are not known.
  virtual void finish_wait(Clock::time_point /*now*/, std::span<const pollfd> /*asked*/) {}

  // Whether the stream has to be looked after from time to time (acknowledgements, losses), also when no operation
  // waits for it.
  virtual bool needs_maintenance() const { return false; }
  // When to call maintain, though no descriptor is ready; absent: never.
  virtual std::optional<Clock::time_point> next_maintenance(Clock::time_point /*now*/) { return std::nullopt; }
  virtual void maintain(Clock::time_point /*now*/) {}

  // Ends the stream in both directions; the peer sees StreamClosed. Safe from any thread, does not block.
  virtual void shutdown() = 0;

  std::uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  std::uint64_t received_bytes() const { return received_bytes_.load(std::memory_order_relaxed); }
  virtual void append_info(std::vector<ConnectionInfo>& infos) const = 0;

protected:
  // Only the driver writes, so a plain load and store is enough.
  void count_sent(std::size_t bytes) { sent_bytes_.store(sent_bytes() + bytes, std::memory_order_relaxed); }
  void count_received(std::size_t bytes) { received_bytes_.store(received_bytes() + bytes, std::memory_order_relaxed); }

private:
  int peer_;
  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::uint64_t> received_bytes_{0};
};

}  // namespace holmes
