#include "holmes/transport/shm_channel.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "holmes/core/error.hpp"
#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

constexpr int ring_count = 4;
constexpr std::size_t cache_line_bytes = 64;
// Bytes one call copies at most: the peer starts on them while this side copies the next.
constexpr std::size_t max_call_bytes = 64 * 1024;

std::size_t page_bytes() {
  static const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

// Each word has its own cache line: the writer of one never disturbs the reader of another.
struct ShmSegment::Ring {
  alignas(cache_line_bytes) std::atomic<std::uint64_t> produced;
  alignas(cache_line_bytes) std::atomic<std::uint64_t> consumed;
  alignas(cache_line_bytes) std::atomic<std::uint32_t> reader_sleeps;
  alignas(cache_line_bytes) std::atomic<std::uint32_t> writer_sleeps;
  alignas(cache_line_bytes) std::atomic<std::uint32_t> closed;
};

std::size_t ShmSegment::segment_bytes(std::size_t ring_bytes) { return page_bytes() + ring_count * ring_bytes; }

std::size_t ShmSegment::ring_bytes_for(int size) {
  // What a cache the ranks share holds, but not the L2 of the writer: a line that was evicted from there is read much
  // faster than one that has to be fetched out of it (measured: 1 MiB against 256 KiB is 1.5 to 1.9 times as fast with
  // 2 ranks, 512 KiB best with 4).
  constexpr std::size_t total_bytes = 3 << 19;
  const std::size_t share = total_bytes / static_cast<std::size_t>(std::max(size - 1, 1));
  return std::bit_floor(std::clamp<std::size_t>(share, 64 * 1024, 1024 * 1024));
}

ShmSegment::ShmSegment(int fd, std::size_t bytes) {
  static_assert(sizeof(Ring) * ring_count <= 4096, "the control words fit the first page");
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");
  ring_bytes_ = (bytes - page_bytes()) / ring_count;
  const auto check = [](void* mapped) {
    if (mapped != MAP_FAILED) return mapped;
    throw SystemError("cannot map the shared memory of a rank pair: " + errno_text(errno) +
                          "; check the limits of memory, of address space (ulimit -v) and of mappings (sysctl "
                          "vm.max_map_count), or set HOLMES_SHM=0",
                      {.rank = {}, .peer = {}, .host = {}, .nic = "shm", .system_errno = errno});
  };
  // In memory: head, 0 0, 1 1, 2 2, 3 3; in the segment: head, 0, 1, 2, 3. What follows each other in both is one
  // mapping (head 0, 0 1, 1 2, 2 3, 3): the kernel allows a process only so many.
  base_ =
      static_cast<std::byte*>(check(::mmap(nullptr, mapped_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
  std::size_t from = 0;  // in the segment
  std::byte* to = base_;
  for (int i = 0; i <= ring_count; ++i) {
    const std::size_t end = page_bytes() + static_cast<std::size_t>(std::min(i + 1, ring_count)) * ring_bytes_;
    check(::mmap(to, end - from, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(from)));
    to += end - from;
    from = end - ring_bytes_;
  }
}

ShmSegment::~ShmSegment() { ::munmap(base_, mapped_bytes()); }

std::size_t ShmSegment::mapped_bytes() const { return page_bytes() + 2 * ring_count * ring_bytes_; }

ShmSegment::Ring& ShmSegment::ring(int index) const { return reinterpret_cast<Ring*>(base_)[index]; }

std::byte* ShmSegment::data(int index) const {
  return base_ + page_bytes() + 2 * static_cast<std::size_t>(index) * ring_bytes_;
}

ShmChannel::ShmChannel(int peer, std::shared_ptr<ShmSegment> segment, int sender, int receiver,
                       std::function<void()> ring_doorbell, ConnectionInfo info)
    : Channel(peer),
      segment_(std::move(segment)),
      out_(segment_->ring(sender)),
      in_(segment_->ring(receiver)),
      out_data_(segment_->data(sender)),
      in_data_(segment_->data(receiver)),
      ring_doorbell_(std::move(ring_doorbell)),
      info_(std::move(info)) {}

std::size_t ShmChannel::readable_bytes() const {
  const std::uint64_t bytes = in_.produced.load(std::memory_order_acquire) - consumed_;
  if (bytes > segment_->ring_bytes())
    throw ProtocolError("the shared-memory ring of rank " + std::to_string(peer()) +
                        " is corrupt: " + std::to_string(bytes) + " bytes claimed in a ring of " +
                        std::to_string(segment_->ring_bytes()));
  return bytes;
}

// The peer's counter is looked at only where the ring is half full: it is in the peer's cache.
std::size_t ShmChannel::writable_bytes() {
  if (produced_ - known_consumed_ > segment_->ring_bytes() / 2)
    known_consumed_ = out_.consumed.load(std::memory_order_acquire);
  const std::uint64_t used = produced_ - known_consumed_;
  if (used > segment_->ring_bytes())
    throw ProtocolError("the shared-memory ring to rank " + std::to_string(peer()) + " is corrupt");
  return segment_->ring_bytes() - used;
}

std::size_t ShmChannel::try_send(std::span<const iovec> pieces) {
  std::size_t room = std::min(writable_bytes(), max_call_bytes);
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, room);
    copy_to_ring_(out_data_ + ((produced_ + total) & (segment_->ring_bytes() - 1)), piece.iov_base, bytes);
    total += bytes;
    room -= bytes;
    if (bytes < piece.iov_len) break;
  }
  if (total == 0) {
    if (out_.closed.load(std::memory_order_relaxed)) throw StreamClosed{peer(), 0};
    return 0;
  }
  produced_ += total;
  out_.produced.store(produced_, std::memory_order_seq_cst);
  if (out_.reader_sleeps.load(std::memory_order_seq_cst) && out_.reader_sleeps.exchange(0)) ring_doorbell_();
  count_sent(total);
  return total;
}

std::size_t ShmChannel::try_recv(std::span<const iovec> pieces) {
  std::size_t available = std::min(readable_bytes(), max_call_bytes);
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, available);
    copy_cached(piece.iov_base, in_data_ + ((consumed_ + total) & (segment_->ring_bytes() - 1)), bytes);
    total += bytes;
    available -= bytes;
    if (bytes < piece.iov_len) break;
  }
  if (total == 0) {
    if (in_.closed.load(std::memory_order_relaxed) && readable_bytes() == 0) throw StreamClosed{peer(), 0};
    return 0;
  }
  consume(total);
  return total;
}

const std::byte* ShmChannel::try_peek(std::size_t bytes) {
  if (readable_bytes() >= bytes) return in_data_ + (consumed_ & (segment_->ring_bytes() - 1));
  if (in_.closed.load(std::memory_order_relaxed)) throw StreamClosed{peer(), 0};
  return nullptr;
}

void ShmChannel::consume(std::size_t bytes) {
  consumed_ += bytes;
  in_.consumed.store(consumed_, std::memory_order_seq_cst);
  if (in_.writer_sleeps.load(std::memory_order_seq_cst) && in_.writer_sleeps.exchange(0)) ring_doorbell_();
  count_received(bytes);
}

bool ShmChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& /*fds: the control socket wakes*/) {
  // Announce first, look again after: either this side sees the change or the peer sees the announcement.
  if (for_recv) {
    const std::uint64_t before = in_.produced.load(std::memory_order_relaxed);
    if (before != waited_produced_) {
      waited_produced_ = before;
      return false;
    }
    in_.reader_sleeps.store(1, std::memory_order_seq_cst);
    if (in_.produced.load(std::memory_order_seq_cst) != before) return false;
  }
  if (for_send) {
    out_.writer_sleeps.store(1, std::memory_order_seq_cst);
    known_consumed_ = out_.consumed.load(std::memory_order_seq_cst);
    if (writable_bytes() > 0) return false;
  }
  return !in_.closed.load(std::memory_order_seq_cst);
}

void ShmChannel::finish_wait() {
  in_.reader_sleeps.store(0, std::memory_order_relaxed);
  out_.writer_sleeps.store(0, std::memory_order_relaxed);
}

void ShmChannel::shutdown() {
  out_.closed.store(1, std::memory_order_seq_cst);
  in_.closed.store(1, std::memory_order_seq_cst);
  ring_doorbell_();
}

void ShmChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  infos.push_back(info_);
  infos.back().sent_bytes = sent_bytes();
  infos.back().received_bytes = received_bytes();
}

}  // namespace holmes
