#include "holmes/transport/shm/cma.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "holmes/core/random.hpp"
#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

constexpr unsigned what_bits = CmaRegion::what_bits;
constexpr std::uint64_t what_mask = (1u << what_bits) - 1;

std::uint64_t word(std::uint64_t position, std::uint64_t what) { return position << what_bits | what; }

// A word that another process does not have at the same place, be it one that got this one's number.
const std::uint64_t& own_token() {
  static const auto* token = new std::uint64_t(random_number());
  return *token;
}

// Returns how many bytes of `from` the pieces took.
std::size_t scatter(std::span<const iovec> pieces, std::span<const std::byte> from, bool bypass_cache) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, from.size() - total);
    copy_stream(piece.iov_base, from.data() + total, bytes, bypass_cache);
    total += bytes;
  }
  return total;
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
  std::size_t copied_bytes = 0;
  for (std::size_t i = 0; i < pieces.size() && piece_begin < end_; ++i) {
    CmaRegion::Piece& piece = shared_.pieces[i];
    const auto& [data, length] = pieces[i];
    const bool is_copied = length <= CmaRegion::max_copied_bytes && length <= shared_.copies.size() - copied_bytes;
    if (is_copied) std::memcpy(&shared_.copies[copied_bytes], data, length);
    const std::uint64_t begin = is_copied ? copied_bytes : reinterpret_cast<std::uint64_t>(data);
    if (is_copied) copied_bytes += length;
    piece.base.store(begin - piece_begin, std::memory_order_relaxed);
    piece_begin += length;
    piece.end.store(piece_begin, std::memory_order_relaxed);
    piece.is_copied.store(is_copied, std::memory_order_relaxed);
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
  pieces = pieces.first(std::min(pieces.size(), max_pieces));
  const auto first = std::ranges::find_if(shared_.pieces, [&](const auto& piece) { return position < piece.end; });
  if (first == std::end(shared_.pieces)) return refuse_busy(position);
  if (shared_.place.id != 0) {
    const std::byte* from = in_place(position, bytes);
    return from ? scatter(pieces, {from, bytes}, bypasses_cache_) : refuse_busy(position);
  }
  if (first->is_copied) {
    const std::span all(shared_.copies);
    const std::uint64_t begin = std::min<std::uint64_t>(first->base + position, all.size());
    const std::uint64_t left = std::min<std::uint64_t>(first->end - position, all.size() - begin);
    if (left == 0) return refuse_busy(position);
    return scatter(pieces, all.subspan(begin, std::min<std::size_t>(left, bytes)), /*bypass_cache=*/false);
  }
  // One call reads one process's memory, whatever takes its number meanwhile. (The token after the data, when the
  // caches hold that, would take half a microsecond longer.)
  std::uint64_t token = 0;
  std::array<iovec, max_pieces + 1> remote{{{reinterpret_cast<void*>(shared_.token_address), sizeof token}}};
  std::size_t remote_count = 1;
  std::uint64_t from = position;
  for (auto piece = first; piece != std::end(shared_.pieces) && !piece->is_copied; ++piece) {
    const std::uint64_t end = std::min<std::uint64_t>(piece->end, position + bytes);
    if (from >= end) break;
    remote[remote_count++] = {reinterpret_cast<void*>(piece->base + from), end - from};
    from = end;
  }
  std::array<iovec, max_pieces + 1> local{{{&token, sizeof token}}};
  std::size_t local_count = 1;
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t part = std::min(piece.iov_len, from - position - total);
    local[local_count++] = {piece.iov_base, part};
    total += part;
  }
  const ssize_t copied = ::process_vm_readv(shared_.pid, local.data(), local_count, remote.data(), remote_count, 0);
  if (copied == static_cast<ssize_t>(sizeof token + total) && token == shared_.token) return total;
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
