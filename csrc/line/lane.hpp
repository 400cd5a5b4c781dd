// Lane: one direction of a line. Packets go in and come out later, some of them early, some never.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "line/frame.hpp"

namespace holmes::line {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;

struct Impairment {
  Duration delay{0};
  Duration jitter{0};  // a frame's delay differs by up to this, evenly; frames stay in order
  double loss = 0;     // the share of packets that never come out
  double reorder = 0;  // the share of packets that come out at once, ahead of those that wait
  std::size_t most_bytes = std::size_t{256} << 20;     // held at once; beyond it packets are lost
  Duration most_wait = std::chrono::milliseconds(50);  // of what is due, for a device that takes no more
};

struct Counters {
  std::uint64_t packets = 0;  // that came to the line
  std::uint64_t lost = 0;     // as was asked for
  std::uint64_t reordered = 0;
  std::uint64_t overflowed = 0;  // as it held too much
  std::uint64_t dropped = 0;     // as the device took no more
};

// Geometric gaps: how many packets come before the next one that is hit.
class Hits {
public:
  // Whether a hit lies among the next `packets`: how many come before it. They count as gone by up to that one.
  std::optional<std::size_t> next_within(std::size_t packets, double share, std::mt19937_64& random);

private:
  double share_ = 0;
  std::uint64_t gap_ = 0;
};

// Knows no clock: the caller says what time it is. One thread at a time. The same seed, settings and frames have the
// same fate.
class Lane {
public:
  explicit Lane(std::uint64_t seed) : random_(seed) {}

  void set(const Impairment& impairment) { impairment_ = impairment; }
  void take(Bytes frame, Time now);

  // When the first of the waiting frames is due; nothing where none waits.
  std::optional<Time> next_due() const;
  // The frame that leaves next; only where next_due() says that there is one.
  Bytes front() const;
  void pop();
  // The device takes no more: what has waited for it longer than a queue would is lost, as in that queue.
  void drop_overdue(Time now);

  const Counters& counters() const { return counters_; }
  std::size_t held_bytes() const { return held_bytes_; }

private:
  struct Waiting {
    Time due;
    std::vector<std::uint8_t> frame;
  };

  void take_packets(const Layout& layout, Bytes frame, std::size_t first, std::size_t count, Time due, Time now);
  void hold(std::deque<Waiting>& queue, const Layout& layout, Bytes frame, std::size_t first, std::size_t count,
            Time due);
  Time due_of_next(Time now);

  Impairment impairment_;
  std::mt19937_64 random_;
  Hits losses_, reorderings_;
  std::deque<Waiting> at_once_, later_;
  Time last_due_{};
  std::size_t held_bytes_ = 0;
  Counters counters_;
};

}  // namespace holmes::line
