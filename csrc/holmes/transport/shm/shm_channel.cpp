#include "holmes/transport/shm/shm_channel.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/types.hpp"
#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

// Bytes one call copies at most: the peer starts on them while this side copies the next.
constexpr std::size_t max_copy_bytes = 64 * 1024;
// What is left of a message that goes one way goes in steps that get shorter, down to this: the receiver's copy then
// ends soon after. (A round of 64 KiB: 10.2 instead of 12.0 us; with all steps short 256 KiB would take 6 % longer, and
// collectives, whose ranks copy both ways, 10 %.)
constexpr std::size_t min_step_bytes = 16 * 1024;
// The same by CMA, where a call costs a system call too (64 MiB in calls of 1 MiB take 1.05 times as long), and where
// the peer waits for the end of all. Some milliseconds, so that this side looks around now and then.
constexpr std::size_t max_pull_bytes = 16 * 1024 * 1024;
// What is read in place takes no system call, but both sides look at each other's words.
constexpr std::size_t min_in_place_bytes = 16 * 1024;

// How far ahead of what is sent a ring's lines are fetched to be written.
constexpr std::size_t prefetch_bytes = 4 * ShmSegment::cache_line_bytes;
// What was taken out of a ring in small parts and is not told yet: the peer only looks where its ring is half full.
constexpr std::size_t most_untold_bytes = 4096;

void gather(std::byte* to, std::span<const iovec> pieces) {
  for (const iovec& piece : pieces) {
    std::memcpy(to, piece.iov_base, piece.iov_len);
    to += piece.iov_len;
  }
}

std::size_t step_bytes_of(std::size_t bytes) {
  return bytes <= min_step_bytes ? bytes : std::max(bytes / 4, min_step_bytes);
}

}  // namespace

std::size_t ShmSegment::segment_bytes(RingBytes bytes) { return page_bytes() + 2 * (bytes.collective + bytes.p2p); }

ShmSegment::RingBytes ShmSegment::ring_bytes_for(int size) {
  // A line that the reader's L2 still holds has to be taken from there before it is written again; one that was evicted
  // comes out of the cache that the ranks share, in a third of the time. So a ring is larger than an L2, and what is
  // larger still only costs room in the caches. (Measured on Zen 4, L2 of 1 MiB, against 1 MiB, messages one way: 64
  // KiB 1.24 times as fast with 1.25 MiB, 1.5 times with 1.5, 1.75 with 2; both ways 256 KiB 1.04 with 1.5 MiB, 0.8
  // with 2.) Messages go to few peers, and the more fits in, the less often two ranks that share a processor take turns
  // (measured: 8 ranks on 2 processors, 64 KiB one way, 21 us with 1 MiB and 29 us with 128 KiB).
  constexpr std::size_t p2p_bytes = 8 << 20, most_p2p_bytes = 3 << 19;
  // A collective writes to all peers, and all of it is in the caches at once. (2 ranks, 64 KiB: 1.08 to 1.2 times as
  // fast with 1.25 MiB as with 1, larger ones alike; with 1.5 MiB 1.13 to 1.5, but 4 MiB 0.92 to 0.97. 4 ranks: 512 KiB
  // best.)
  constexpr std::size_t collective_bytes = 3 << 19, most_collective_bytes = 5 << 18;
  const auto share = [&](std::size_t total_bytes, std::size_t most_bytes) {
    const std::size_t bytes = total_bytes / static_cast<std::size_t>(std::max(size - 1, 1));
    return bytes >= most_bytes ? most_bytes : std::bit_floor(std::max<std::size_t>(bytes, 64 * 1024));
  };
  return {share(collective_bytes, most_collective_bytes), share(p2p_bytes, most_p2p_bytes)};
}

ShmSegment::ShmSegment(int fd, RingBytes bytes) : bytes_(bytes) {
  static_assert(sizeof(Ring) * ring_count <= 4096, "the control words fit the first page");
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");
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
  std::size_t from = 0;              // in the segment
  std::size_t begin = page_bytes();  // of ring i there
  std::byte* to = base_;
  for (int i = 0; i <= ring_count; ++i) {
    const std::size_t end = i < ring_count ? begin + ring_bytes(i) : begin;
    check(::mmap(to, end - from, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(from)));
    to += end - from;
    from = std::exchange(begin, end);
  }
}

ShmSegment::~ShmSegment() { ::munmap(base_, mapped_bytes()); }

ShmSegment::Ring& ShmSegment::ring(int index) const { return reinterpret_cast<Ring*>(base_)[index]; }

std::byte* ShmSegment::data(int index) const {
  std::size_t before = 0;
  for (int i = 0; i < index; ++i) before += ring_bytes(i);
  return base_ + page_bytes() + 2 * before;
}

ShmChannel::ShmChannel(int peer, std::shared_ptr<ShmSegment> segment, int sender, int receiver,
                       std::function<void()> ring_doorbell, CmaUse cma, ConnectionInfo info,
                       std::shared_ptr<MessageBytes> messages, Duration patience)
    : Channel(peer),
      segment_(std::move(segment)),
      out_(segment_->ring(sender)),
      in_(segment_->ring(receiver)),
      ring_bytes_(segment_->ring_bytes(sender)),
      out_at_(segment_->data(sender)),
      out_end_(out_at_ + ring_bytes_),
      in_at_(segment_->data(receiver)),
      in_end_(in_at_ + ring_bytes_),
      shown_(out_.cma),
      patience_(patience),
      seen_(in_.cma),
      may_pull_(cma != CmaUse::never),
      tuning_(cma, std::move(messages)),
      ring_doorbell_(std::move(ring_doorbell)),
      info_(std::move(info)) {}

std::size_t ShmChannel::readable_bytes() const {
  const std::uint64_t produced = in_.line.produced(std::memory_order_acquire);
  if (produced <= consumed_) return 0;  // by CMA, which the sender counts when it looks
  const std::uint64_t bytes = produced - consumed_;
  if (bytes > ring_bytes_)
    throw ProtocolError("the shared-memory ring of rank " + std::to_string(peer()) + " is corrupt: " +
                        std::to_string(bytes) + " bytes claimed in a ring of " + std::to_string(ring_bytes_));
  return bytes;
}

// Of the ring that this side writes; more than it has where it is corrupt. The peer's counter is looked at only where
// the ring is half full: it is in the peer's cache.
std::uint64_t ShmChannel::used_bytes() {
  if (produced_ - known_consumed_ > ring_bytes_ / 2) known_consumed_ = out_.consumed.load(std::memory_order_acquire);
  return produced_ - known_consumed_;
}

std::size_t ShmChannel::writable_bytes() {
  const std::uint64_t used = used_bytes();
  if (used > ring_bytes_)
    throw ProtocolError("the shared-memory ring to rank " + std::to_string(peer()) + " is corrupt");
  return ring_bytes_ - used;
}

std::size_t ShmChannel::try_send(std::span<const iovec> pieces) {
  tuning_.offer(pieces);
  if (shown_.is_open()) look_at_cma();
  std::size_t total = 0;
  if (unreported_ > 0) {
    total = std::min(total_bytes(pieces), unreported_);
    unreported_ -= total;
  } else if (!shown_.is_open()) {
    total = send_new(pieces);
  }
  if (total == 0) {
    if (out_.closed.load(std::memory_order_relaxed)) throw StreamClosed{peer(), 0};
    return 0;
  }
  if (tuning_.sent(pieces, total))
    tuning_.end_call(static_cast<std::size_t>(produced_ - out_.consumed.load(std::memory_order_acquire)));
  count_sent(total);
  return total;
}

std::size_t ShmChannel::send_new(std::span<const iovec> pieces) {
  std::size_t room = std::min(writable_bytes(), max_copy_bytes);
  std::size_t total = 0;
  const bool is_one_way = tuning_.is_one_way();
  std::span<const iovec> to_show;
  BufferPlace place;
  for (const iovec& piece : pieces) {
    if (ring_only_ == 0) place = place_to_show(piece);
    if (ring_only_ == 0 && (place.id != 0 || tuning_.uses_cma(piece.iov_len))) {
      to_show = pieces.subspan(static_cast<std::size_t>(&piece - pieces.data()));
      break;
    }
    const std::size_t bytes = std::min(is_one_way ? step_bytes_of(piece.iov_len) : piece.iov_len, room);
    copy_to_ring_(out_at_ + total, piece.iov_base, bytes);
    total += bytes;
    room -= bytes;
    if (bytes < piece.iov_len) break;
  }
  const std::size_t shown_bytes = bytes_to_show(to_show, place);
  wrote(total);
  ring_only_ -= std::min(ring_only_, total);
  if (total > 0) out_.line.publish(produced_);
  if (shown_bytes > 0) {
    shown_.open(produced_, to_show, shown_bytes, place);
    shown_at_ = Clock::now();
  }
  if (total > 0 || shown_bytes > 0) wake_reader();
  return total;
}

// How much of `pieces`, the first of which is to be shown, to show at once: of what is copied, all that goes that way
// with what little is in between, such as the messages of a batch. For each region the two sides wait for each other.
std::size_t ShmChannel::bytes_to_show(std::span<const iovec> pieces, const BufferPlace& place) const {
  if (pieces.empty()) return 0;
  if (place.id != 0) return pieces.front().iov_len;  // there are no trials in place
  std::size_t bytes = 0;
  std::size_t before = 0;
  for (const iovec& piece : pieces.first(std::min(pieces.size(), max_pieces))) {
    before += piece.iov_len;
    if (place_to_show(piece).id != 0) break;
    if (tuning_.uses_cma(piece.iov_len)) bytes = before;
  }
  return bytes;
}

// None beside what goes by CMA, or is to go through the ring in its place.
std::size_t ShmChannel::short_room_bytes() {
  if (shown_.is_open() || unreported_ > 0 || ring_only_ > 0 || out_.closed.load(std::memory_order_relaxed)) return 0;
  return ring_bytes_ - std::min<std::uint64_t>(used_bytes(), ring_bytes_);
}

// Into the ring.
void ShmChannel::wrote(std::size_t bytes) {
  produced_ += bytes;
  out_at_ += bytes;
  if (out_at_ >= out_end_) out_at_ -= ring_bytes_;
}

std::size_t ShmChannel::send_short(std::span<const iovec> pieces, bool /*later*/) {
  const std::size_t total = total_bytes(pieces);
  const bool is_note = total <= RingLine::most_bytes;
  RingLine::Note note{};
  gather(out_at_, pieces);
  if (is_note) gather(reinterpret_cast<std::byte*>(note.data()), pieces);
  wrote(total);
  if (is_note) {
    out_.line.publish(produced_, note, total);
  } else {
    out_.line.publish(produced_);
  }
  wake_reader();
  count_sent(total);
  __builtin_prefetch(out_at_ + prefetch_bytes, /*write*/ 1);
  return total;
}

Channel::ShortView ShmChannel::view_short(std::size_t /*wanted*/) {
  const std::uint64_t produced = in_.line.produced(std::memory_order_acquire);
  if (produced <= consumed_) return {{}, stage_.bytes() > 0 || seen_.available(consumed_) > 0};
  const std::uint64_t there = produced - consumed_;
  if (stage_.bytes() > 0 || there > ring_bytes_) return {{}, true};
  if (in_.line.read(consumed_, produced, note_)) return {{reinterpret_cast<std::byte*>(note_.data()), there}, false};
  return {{in_at_, there}, false};
}

// Of a piece that the receiver is to read in place; an id of 0: of none such.
BufferPlace ShmChannel::place_to_show(const iovec& piece) const {
  const bool is_shown = tuning_.reads_in_place() && may_pull_ && !was_refused_in_place_;
  if (!is_shown || piece.iov_len < min_in_place_bytes) return {};
  return SharedBuffer::place_of(piece.iov_base, piece.iov_len);
}

void ShmChannel::look_at_cma() {
  const std::uint64_t position = shown_.position();
  if (shown_.is_refused() && shown_.is_in_place()) {
    was_refused_in_place_ = true;
  } else if (shown_.is_refused()) {
    tuning_.give_up();
  }
  if (position == produced_) return;
  unreported_ += position - produced_;
  produced_ = position;
  known_consumed_ = position;  // all of the ring came before
}

// What nobody has come for by then is withdrawn: a ring takes at least so much of it that a small message is sent
// without the receiver. What is read in place is no message, and the receiver gets through it without this side.
std::optional<Clock::time_point> ShmChannel::withdraws_at() const {
  if (!shown_.is_open() || shown_.is_in_place() || shown_.is_begun()) return std::nullopt;
  return shown_at_ + patience_;
}

void ShmChannel::withdraw_cma() {
  if (!shown_.withdraw()) return;
  ring_only_ = std::min<std::size_t>(shown_.end() - produced_, ring_bytes_);
  tuning_.spoil();
}

void ShmChannel::wake_reader() {
  if (out_.reader_sleeps.load(std::memory_order_seq_cst) && out_.reader_sleeps.exchange(0)) ring_doorbell_();
}

std::size_t ShmChannel::try_recv(std::span<const iovec> pieces) {
  std::size_t total = 0;
  if (stage_.bytes() > 0) {
    total = stage_.take(pieces);
    count_received(total);
    return total;
  }
  total = recv_from_ring(pieces);
  if (total == 0) total = pull(pieces, max_pull_bytes);
  if (total == 0) {
    if (in_.closed.load(std::memory_order_relaxed) && readable_bytes() == 0) throw StreamClosed{peer(), 0};
    return 0;
  }
  tuning_.received(total);
  count_received(total);
  return total;
}

std::size_t ShmChannel::recv_from_ring(std::span<const iovec> pieces) {
  std::size_t available = std::min(readable_bytes(), max_copy_bytes);
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, available);
    copy_cached(piece.iov_base, in_at_ + total, bytes);
    total += bytes;
    available -= bytes;
    if (bytes < piece.iov_len) break;
  }
  if (total > 0) {
    take(total);
    tell_consumed();
  }
  return total;
}

// Copies up to `bytes` out of the peer's memory, where it shows some, into `pieces`.
std::size_t ShmChannel::pull(std::span<const iovec> pieces, std::size_t bytes) {
  if (seen_.available(consumed_) == 0) return 0;
  if (!may_pull_) seen_.refuse(consumed_);
  const std::size_t pulled = may_pull_ ? seen_.copy(consumed_, pieces, bytes) : 0;
  if (pulled == 0) {
    wake_writer();  // which has to send it another way
    return 0;
  }
  took(pulled);
  return pulled;
}

// Out of the peer's memory. What was read after the peer gave up may be anything: it closes before it lets go of the
// memory.
void ShmChannel::took(std::size_t bytes) {
  if (in_.closed.load(std::memory_order_seq_cst)) throw StreamClosed{peer(), 0};
  consumed_ += bytes;
  told_consumed_ = consumed_;
  in_.consumed.store(consumed_, std::memory_order_seq_cst);
  if (seen_.advance(consumed_)) wake_writer();
}

const std::byte* ShmChannel::try_peek(std::size_t bytes) {
  const bool is_closed = in_.closed.load(std::memory_order_seq_cst);  // before the look at what was written until then
  const std::size_t readable = readable_bytes();
  if (stage_.bytes() == 0 && readable >= bytes) return in_at_;
  if (stage_.bytes() == 0 && readable == 0 && may_pull_) {
    const std::byte* held = seen_.hold(consumed_, bytes);
    is_held_ = held != nullptr;
    if (held) return held;
  }
  if (stage_.bytes() > 0 || seen_.available(consumed_ + readable) > 0) stage(bytes);
  if (stage_.bytes() > 0 && stage_.bytes() >= bytes) return stage_.data();
  if (is_closed) throw StreamClosed{peer(), 0};
  tell_consumed();  // room for the rest
  return nullptr;
}

// Takes all that is there, up to `bytes`, out of the ring and by CMA: the peer can go on only then.
void ShmChannel::stage(std::size_t bytes) {
  stage_.fill(bytes, max_peek_bytes(), [this](iovec room) {
    const std::size_t received = recv_from_ring({&room, 1});
    return received > 0 ? received : pull({&room, 1}, room.iov_len);
  });
}

void ShmChannel::consume(std::size_t bytes) {
  if (std::exchange(is_held_, false)) {
    took(bytes);
  } else if (stage_.bytes() > 0) {
    stage_.drop(bytes);
  } else {
    take(bytes);
  }
  count_received(bytes);
}

// Out of the ring.
void ShmChannel::take(std::size_t bytes) {
  consumed_ += bytes;
  in_at_ += bytes;
  if (in_at_ >= in_end_) in_at_ -= ring_bytes_;
  if (consumed_ - told_consumed_ >= most_untold_bytes) tell_consumed();
}

void ShmChannel::tell_consumed() {
  if (consumed_ == told_consumed_) return;
  told_consumed_ = consumed_;
  in_.consumed.store(consumed_, std::memory_order_seq_cst);
  wake_writer();
}

void ShmChannel::wake_writer() {
  if (in_.writer_sleeps.load(std::memory_order_seq_cst) && in_.writer_sleeps.exchange(0)) ring_doorbell_();
}

bool ShmChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& /*fds: the control socket wakes*/) {
  tell_consumed();
  // Announce first, look again after: either this side sees the change or the peer sees the announcement.
  if (for_recv) {
    const std::uint64_t produced = in_.line.produced(std::memory_order_relaxed);
    const std::uint64_t cma = seen_.state();
    if (produced != waited_produced_ || cma != waited_cma_) {
      waited_produced_ = produced;
      waited_cma_ = cma;
      return false;
    }
    in_.reader_sleeps.store(1, std::memory_order_seq_cst);
    if (in_.line.produced(std::memory_order_seq_cst) != produced || seen_.state() != cma) return false;
  }
  if (for_send) {
    out_.writer_sleeps.store(1, std::memory_order_seq_cst);
    if (shown_.is_open()) look_at_cma();
    if (const auto at = withdraws_at(); at && *at <= Clock::now()) withdraw_cma();
    // The receiver is at it, or will be, and rings when it is through.
    if (shown_.is_open()) return !in_.closed.load(std::memory_order_seq_cst);
    if (unreported_ > 0) return false;
    known_consumed_ = out_.consumed.load(std::memory_order_seq_cst);
    if (writable_bytes() > 0) return false;
  }
  // What is left of a peer that is gone may have to wait for another one's.
  return !in_.closed.load(std::memory_order_seq_cst) || (!for_send && readable_bytes() > 0);
}

void ShmChannel::finish_wait(Clock::time_point /*now*/, std::span<const pollfd> /*asked*/) {
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
