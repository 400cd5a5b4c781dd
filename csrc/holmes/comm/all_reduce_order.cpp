#include "holmes/comm/all_reduce_order.hpp"

#include <bit>

namespace holmes {
namespace {

// Of so many calls of a size, two go the other way; the first one finds the caches filled by the better way and is not
// counted.
constexpr unsigned calls_per_trial = 64;
constexpr unsigned trial_begin = 2;
constexpr unsigned trial_calls = 2;
// By so much it has to be faster.
constexpr double worth = 0.95;

bool is_trial(unsigned call) { return call % calls_per_trial - trial_begin < trial_calls; }
bool is_counted(unsigned call) { return call % calls_per_trial != trial_begin; }

}  // namespace

bool AllReduceOrder::contributions_first(std::size_t bytes) const {
  const Size& size = sizes_[std::bit_width(bytes)];
  return can_ && size.is_better != is_trial(size.calls);
}

std::uint64_t AllReduceOrder::vote(std::size_t bytes, bool all_windows, bool always) const {
  const Size& size = sizes_[std::bit_width(bytes)];
  const double in_turns = size.in_turns.s_per_byte();
  const double first = size.contributions_first.s_per_byte();
  const bool is_faster = in_turns > 0 && first > 0 && first < worth * in_turns;
  return (all_windows ? can : 0) | (is_faster || always ? prefers : 0);
}

void AllReduceOrder::ended(std::size_t bytes, double seconds, std::uint64_t votes) {
  Size& size = sizes_[std::bit_width(bytes)];
  if (seconds > 0 && is_counted(size.calls))
    (contributions_first(bytes) ? size.contributions_first : size.in_turns).add(bytes, seconds);
  ++size.calls;
  size.is_better = (votes & prefers) != 0;
  can_ = (votes & can) != 0;
}

}  // namespace holmes
