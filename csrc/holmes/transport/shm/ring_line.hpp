// RingLine: the cache line in which the writer of a ring tells how much there is, and with it what came last, where
// that is short: the reader then needs one line of the writer's cache and not three.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace holmes {

// Lies in shared memory, zeroed; one writer and one reader. Everything is in the ring too, so a note that the reader
// comes too late for costs nothing else.
class alignas(64) RingLine {
public:
  // A note: a header of a cache line, of which the last three words are zero, and at most one word behind it; or less.
  static constexpr std::size_t most_bytes = 72;
  using Note = std::array<std::uint64_t, most_bytes / sizeof(std::uint64_t)>;

  std::uint64_t produced(std::memory_order order) const { return produced_.load(order); }
  // Tells of bytes until `produced`.
  void publish(std::uint64_t produced);
  // And what the last `bytes` of them are; behind these, `note` is zero.
  void publish(std::uint64_t produced, const Note& note, std::size_t bytes);
  // Whether bytes `from` to `produced`, which the writer told, are a note; then they are in `note`.
  bool read(std::uint64_t from, std::uint64_t produced, Note& note) const;

private:
  std::atomic<std::uint64_t> produced_;
  // Of which bytes the words are; written before them and read after, so what is equal then was so in between.
  std::atomic<std::uint64_t> tag_;
  std::array<std::atomic<std::uint64_t>, 6> words_;
};
static_assert(sizeof(RingLine) == 64, "one cache line");

}  // namespace holmes
