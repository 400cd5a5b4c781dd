#include "line/lane.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace holmes::line {

namespace {

// Evenly in (0, 1]; of our own, as a library's distribution may draw otherwise on another machine.
double even(std::mt19937_64& random) { return (static_cast<double>(random() >> 11) + 1) * 0x1p-53; }

std::uint64_t draw_gap(double share, std::mt19937_64& random) {
  if (share >= 1) return 0;
  const double gap = std::floor(std::log(even(random)) / std::log1p(-share));
  return gap < 1e18 ? static_cast<std::uint64_t>(gap) : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace

std::optional<std::size_t> Hits::next_within(std::size_t packets, double share, std::mt19937_64& random) {
  if (share != share_) {
    share_ = share;
    if (share > 0) gap_ = draw_gap(share, random);
  }
  if (share <= 0) return std::nullopt;
  if (gap_ >= packets) {
    gap_ -= packets;
    return std::nullopt;
  }
  const auto before = static_cast<std::size_t>(gap_);
  gap_ = draw_gap(share, random);
  return before;
}

void Lane::take(Bytes frame, Time now) {
  const Layout layout(frame);
  counters_.packets += layout.packets();
  const Time due = due_of_next(now);
  std::size_t first = 0;
  while (first < layout.packets()) {
    const std::size_t rest = layout.packets() - first;
    const auto lost = losses_.next_within(rest, impairment_.loss, random_);
    take_packets(layout, frame, first, lost.value_or(rest), due, now);
    first += lost.value_or(rest);
    if (!lost) break;
    ++counters_.lost;
    ++first;
  }
}

void Lane::take_packets(const Layout& layout, Bytes frame, std::size_t first, std::size_t count, Time due, Time now) {
  while (count > 0) {
    const auto early = reorderings_.next_within(count, impairment_.reorder, random_);
    hold(later_, layout, frame, first, early.value_or(count), due);
    if (!early) return;
    hold(at_once_, layout, frame, first + *early, 1, now);
    ++counters_.reordered;
    first += *early + 1;
    count -= *early + 1;
  }
}

void Lane::hold(std::deque<Waiting>& queue, const Layout& layout, Bytes frame, std::size_t first, std::size_t count,
                Time due) {
  if (count == 0) return;
  auto part = layout.cut(frame, first, count);
  if (held_bytes_ + part.size() > impairment_.most_bytes) {
    counters_.overflowed += count;
    return;
  }
  held_bytes_ += part.size();
  queue.push_back({due, std::move(part)});
}

Time Lane::due_of_next(Time now) {
  Duration delay = impairment_.delay;
  if (impairment_.jitter > Duration{0}) {
    const double share = 2 * even(random_) - 1;
    delay += std::chrono::duration_cast<Duration>(impairment_.jitter * share);
  }
  last_due_ = std::max(last_due_, now + delay);
  return last_due_;
}

std::optional<Time> Lane::next_due() const {
  if (!at_once_.empty()) return at_once_.front().due;
  if (!later_.empty()) return later_.front().due;
  return std::nullopt;
}

Bytes Lane::front() const { return at_once_.empty() ? later_.front().frame : at_once_.front().frame; }

void Lane::pop() {
  auto& queue = at_once_.empty() ? later_ : at_once_;
  held_bytes_ -= queue.front().frame.size();
  queue.pop_front();
}

void Lane::drop_overdue(Time now) {
  for (auto due = next_due(); due && *due + impairment_.most_wait < now; due = next_due()) {
    counters_.dropped += Layout(front()).packets();
    pop();
  }
}

}  // namespace holmes::line
