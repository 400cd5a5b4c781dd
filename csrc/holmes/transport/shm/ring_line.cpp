#include "holmes/transport/shm/ring_line.hpp"

namespace holmes {
namespace {

// The position behind the note, and how long it is. (Every position in between wipes the tag or writes another, so 56
// of its bits are enough.)
std::uint64_t tag_of(std::uint64_t produced, std::size_t bytes) { return (produced << 8) | bytes; }

// Of a note, which the line holds. The others are zero.
constexpr std::array<std::size_t, 6> kept{0, 1, 2, 3, 4, 8};

}  // namespace

void RingLine::publish(std::uint64_t produced) {
  if (tag_.load(std::memory_order_relaxed) != 0) tag_.store(0, std::memory_order_relaxed);
  produced_.store(produced, std::memory_order_seq_cst);
}

void RingLine::publish(std::uint64_t produced, const Note& note, std::size_t bytes) {
  if ((note[5] | note[6] | note[7]) != 0) return publish(produced);
  tag_.store(tag_of(produced, bytes), std::memory_order_relaxed);
  for (std::size_t i = 0; i < kept.size(); ++i) words_[i].store(note[kept[i]], std::memory_order_release);
  produced_.store(produced, std::memory_order_seq_cst);
}

bool RingLine::read(std::uint64_t from, std::uint64_t produced, Note& note) const {
  const std::uint64_t tag = tag_of(produced, produced - from);
  if (produced - from > most_bytes || tag_.load(std::memory_order_acquire) != tag) return false;
  for (std::size_t i = 0; i < kept.size(); ++i) note[kept[i]] = words_[i].load(std::memory_order_acquire);
  return tag_.load(std::memory_order_relaxed) == tag;
}

}  // namespace holmes
