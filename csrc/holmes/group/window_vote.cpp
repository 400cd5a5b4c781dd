#include "holmes/group/window_vote.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace holmes {
namespace {

// Of so many calls of a size, some go the other way. The first one finds the caches filled by the better way and does
// not count, nor does the very first of all.
constexpr unsigned calls_per_trial = 128;
constexpr unsigned trial_begin = 4;
constexpr unsigned uncounted_calls = 1;
// By so much the other way has to be faster.
constexpr double worth = 0.95;
constexpr float infinite = std::numeric_limits<float>::infinity();

// Where in a trial a call is that so many came before; large numbers are outside.
unsigned place_in_trial(unsigned calls) { return calls % calls_per_trial - trial_begin; }

float sum(float a, float b) { return a == 0 || b == 0 ? std::max(a, b) == infinite ? infinite : 0 : a + b; }

}  // namespace

WindowVote::Costs WindowVote::Costs::from(std::uint64_t word) {
  return {std::bit_cast<float>(static_cast<std::uint32_t>(word >> 32)),
          std::bit_cast<float>(static_cast<std::uint32_t>(word))};
}

std::uint64_t WindowVote::Costs::word() const {
  return static_cast<std::uint64_t>(std::bit_cast<std::uint32_t>(ring)) << 32 | std::bit_cast<std::uint32_t>(window);
}

WindowVote::Costs WindowVote::Costs::operator+(const Costs& other) const {
  return {sum(ring, other.ring), sum(window, other.window)};
}

bool WindowVote::concerns(std::size_t bytes, int ranks) {
  return ranks > 1 && bytes / static_cast<std::size_t>(ranks) >= min_window_bytes;
}

WindowVote::Key WindowVote::key(int operation, std::size_t bytes) { return {operation, std::bit_width(bytes)}; }

const WindowVote::Size& WindowVote::size(int operation, std::size_t bytes) const {
  static const Size unknown;
  const auto found = sizes_.find(key(operation, bytes));
  return found == sizes_.end() ? unknown : found->second;
}

bool WindowVote::shows(int operation, std::size_t bytes) const {
  const Size& state = size(operation, bytes);
  const bool is_trial = place_in_trial(state.calls) < uncounted_calls + trial_samples;
  return can_ && (must_ || state.prefers_windows != is_trial);
}

WindowVote::Costs WindowVote::costs(int operation, std::size_t bytes, CmaUse use) const {
  if (use == CmaUse::never) return {.ring = 0, .window = infinite};
  if (use == CmaUse::always) return {.ring = infinite, .window = 0};
  const Size& state = size(operation, bytes);
  return {state.ring.s_per_byte(), state.window.s_per_byte()};
}

void WindowVote::ended(int operation, std::size_t bytes, double seconds, const Costs& total) {
  Size& state = sizes_[key(operation, bytes)];
  CopyCost& cost = shows(operation, bytes) ? state.window : state.ring;
  const unsigned call = place_in_trial(state.calls);
  if (call < uncounted_calls + trial_samples) {
    if (call >= uncounted_calls) state.trial[call - uncounted_calls] = seconds / static_cast<double>(bytes);
    if (call + 1 == uncounted_calls + trial_samples) {
      std::ranges::sort(state.trial);
      cost.add(1, state.trial[trial_samples / 2]);
    }
  } else if (state.calls > 0) {
    cost.add(bytes, seconds);
  }
  ++state.calls;
  can_ = total.window != infinite;
  must_ = total.ring == infinite;
  const auto is_better = [](float other, float present) { return other < static_cast<float>(worth) * present; };
  if (total.ring > 0 && total.window > 0)
    state.prefers_windows =
        state.prefers_windows ? !is_better(total.ring, total.window) : is_better(total.window, total.ring);
}

}  // namespace holmes
