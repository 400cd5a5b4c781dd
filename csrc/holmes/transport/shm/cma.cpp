#include "holmes/transport/shm/cma.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "holmes/core/random.hpp"
#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

constexpr unsigned what_bits = 2;
constexpr std::uint64_t what_mask = (1u << what_bits) - 1;

std::uint64_t word(std::uint64_t position, std::uint64_t what) { return position << what_bits | what; }

// A word that another process does not have at the same place, be it one that got this one's number.
const std::uint64_t& own_token() {
  static const auto* token = new std::uint64_t(random_number());
  return *token;
}

}  // namespace

CmaSender::CmaSender(CmaRegion& shared) : shared_(shared) {
  shared_.pid = ::getpid();
  shared_.token = own_token();
  shared_.token_address = reinterpret_cast<std::uint64_t>(&own_token());
}

void CmaSender::open(std::uint64_t position, std::span<const iovec> pieces, std::size_t bytes, BufferPlace place) {
  begin_ = position;
  end_ = position + bytes;
  std::uint64_t piece_begin = position;
  for (std::size_t i = 0; i < pieces.size() && piece_begin < end_; ++i) {
    const std::uint64_t base = reinterpret_cast<std::uint64_t>(pieces[i].iov_base) - piece_begin;
    piece_begin += pieces[i].iov_len;
    shared_.pieces[i].base.store(base, std::memory_order_relaxed);
    shared_.pieces[i].end.store(piece_begin, std::memory_order_relaxed);
  }
  shared_.end = end_;
  shared_.place = place;
  shared_.place.offset -= position;
  is_in_place_ = place.id != 0;
  is_refused_ = false;
  is_open_ = true;
  shared_.state.store(word(position, CmaRegion::open), std::memory_order_seq_cst);
}

std::uint64_t CmaSender::position() {
  const std::uint64_t state = shared_.state.load(std::memory_order_seq_cst);
  const std::uint64_t position = state >> what_bits;
  is_refused_ = (state & what_mask) == CmaRegion::refused;
  if (is_refused_ || position == end_) {
    shared_.state.store(CmaRegion::shut, std::memory_order_relaxed);
    is_open_ = false;
  }
  return position;
}

bool CmaSender::withdraw() {
  std::uint64_t expected = word(begin_, CmaRegion::open);
  if (!shared_.state.compare_exchange_strong(expected, CmaRegion::shut)) return false;
  is_open_ = false;
  return true;
}

std::size_t CmaReceiver::available(std::uint64_t position) const {
  if (shared_.state.load(std::memory_order_acquire) != word(position, CmaRegion::open)) return 0;
  return shared_.end - position;
}

std::size_t CmaReceiver::copy(std::uint64_t position, std::span<const iovec> pieces, std::size_t bytes) {
  std::uint64_t expected = word(position, CmaRegion::open);
  if (!shared_.state.compare_exchange_strong(expected, word(position, CmaRegion::busy))) return 0;
  bytes = std::min<std::size_t>(bytes, shared_.end - position);
  std::array<iovec, max_pieces + 1> local;
  std::size_t count = 0;
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    if (count == max_pieces || total == bytes) break;
    local[count] = {piece.iov_base, std::min(piece.iov_len, bytes - total)};
    total += local[count++].iov_len;
  }
  if (shared_.place.id != 0) {
    const std::byte* from = in_place(position, total);
    if (!from) return refuse_busy(position);
    for (const iovec& piece : std::span(local.data(), count)) {
      copy_stream(piece.iov_base, from, piece.iov_len, bypasses_cache_);
      from += piece.iov_len;
    }
    return total;
  }
  // The token comes last: all before it was the sender's, too.
  std::uint64_t token = 0;
  local[count++] = {&token, sizeof token};
  std::array<iovec, max_pieces + 1> remote;
  std::size_t remote_count = 0;
  std::uint64_t from = position;
  for (const CmaRegion::Piece& piece : shared_.pieces) {
    const std::uint64_t end = std::min<std::uint64_t>(piece.end, position + total);
    if (from >= end) continue;
    remote[remote_count++] = {reinterpret_cast<void*>(piece.base + from), end - from};
    from = end;
  }
  remote[remote_count++] = {reinterpret_cast<void*>(shared_.token_address), sizeof token};
  const ssize_t copied = ::process_vm_readv(shared_.pid, local.data(), count, remote.data(), remote_count, 0);
  if (copied == static_cast<ssize_t>(total + sizeof token) && token == shared_.token) return total;
  return refuse_busy(position);
}

std::size_t CmaReceiver::refuse_busy(std::uint64_t position) {
  shared_.state.store(word(position, CmaRegion::refused), std::memory_order_seq_cst);
  return 0;
}

const std::byte* CmaReceiver::hold(std::uint64_t position, std::size_t bytes) {
  std::uint64_t expected = word(position, CmaRegion::open);
  if (!shared_.state.compare_exchange_strong(expected, word(position, CmaRegion::busy)) &&
      expected != word(position, CmaRegion::busy))
    return nullptr;
  const std::byte* data = bytes <= shared_.end - position ? in_place(position, bytes) : nullptr;
  if (!data) shared_.state.store(word(position, CmaRegion::open), std::memory_order_seq_cst);
  return data;
}

const std::byte* CmaReceiver::in_place(std::uint64_t position, std::size_t bytes) {
  BufferPlace place = shared_.place;
  if (place.id == 0) return nullptr;
  place.offset += position;
  return buffers_.find(shared_.pid, place, bytes);
}

void CmaReceiver::refuse(std::uint64_t position) {
  std::uint64_t expected = word(position, CmaRegion::open);
  shared_.state.compare_exchange_strong(expected, word(position, CmaRegion::refused));
}

bool CmaReceiver::advance(std::uint64_t position) {
  const bool is_end = position == shared_.end;  // before the sender may open another one
  shared_.state.store(word(position, CmaRegion::open), std::memory_order_seq_cst);
  return is_end;
}

}  // namespace holmes
