#include "holmes/transport/shm/copy_tuning.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

// --- stores ---
// A sample takes up to 3 us: a few percent of so many copies.
constexpr unsigned copies_per_sample = 64;
// What an ordinary store may cost more than one around the caches, seconds per byte: the reader gets that back, as it
// finds the line in a cache (measured difference: up to 0.07 ns where cores are near, 0.3 to 0.6 where they are far; on
// average less where the reader sometimes runs on the writer's core).
constexpr double worth_s_per_byte = 0.15e-9;
// A difference counts so much at most, and with this weight in the average: one sample, an interrupt's, decides
// nothing.
constexpr double max_difference_s_per_byte = 0.5e-9;
constexpr double sample_weight = 0.2;

// A call that takes long was interrupted. A trial stands for many calls; what it found to be faster than it was is.
constexpr double cost_weight = 0.2;
constexpr double trial_weight = 0.5;
constexpr double max_growth = 1.25;
// By so much another way has to be faster.
constexpr double change_worth = 0.95;

// --- of one channel ---
// Messages go both ways at once where so many bytes come, for each that is sent, while they go: of about the last
// `two_way_bytes` that were sent. (By bytes, as what the sender's memory is read for comes in few large pieces.)
constexpr double two_way_limit = 0.25;
constexpr double two_way_bytes = 32 * 1024 * 1024;

// Where the first `bytes` bytes of `pieces` end in memory.
const void* end_of(std::span<const iovec> pieces, std::size_t bytes) {
  for (const iovec& piece : pieces) {
    if (bytes <= piece.iov_len) return static_cast<const std::byte*>(piece.iov_base) + bytes;
    bytes -= piece.iov_len;
  }
  return nullptr;
}

// --- trials ---
// Of so many calls, some go another way; more of the first ones, as little is known: each cycle is as long as all
// before it, up to these, the second where every other way costs more than `clear_cost` times as much. (1 MiB both
// ways: trials in each 128 calls took 3 % of the time, in each 256 1.6 %.)
constexpr unsigned first_cycle_calls = 64;
constexpr unsigned long_cycle_calls = 256;
constexpr unsigned longest_cycle_calls = 1024;
constexpr double clear_cost = 1.6;
constexpr unsigned trial_begin = 4;
constexpr unsigned calls_of_trial = 4;
constexpr unsigned uncounted_calls = 1;
constexpr float infinite = std::numeric_limits<float>::infinity();

constexpr std::array all_ways{CopyWay::ring, CopyWay::cma, CopyWay::in_place};

// Which trial a call is of that so many came before, and its place in it; absent: of none. At first every other way has
// one, later one of them in turns.
struct Trial {
  unsigned cycle;
  unsigned number;
  unsigned call;
};
std::optional<Trial> trial_of(unsigned calls, bool is_clear) {
  const bool is_first = calls < first_cycle_calls;
  const unsigned most_calls = is_clear ? longest_cycle_calls : long_cycle_calls;
  const unsigned begin = is_first ? 0 : std::max(std::bit_floor(calls), calls - calls % most_calls);
  const unsigned since = calls - begin - trial_begin;  // large: before the first
  const unsigned cycle = is_first ? 0 : std::bit_width(calls / first_cycle_calls) + calls / most_calls;
  const Trial trial{cycle, since / (2 * calls_of_trial), since % (2 * calls_of_trial)};
  if (trial.number + 1 >= copy_way_count || trial.call >= calls_of_trial) return std::nullopt;
  return trial;
}

// A float by its upper half, rounded; infinity and 0 stay what they are.
std::uint16_t to_half(float value) {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + 0x8000) >> 16);
}
float from_half(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

float sum(float a, float b) { return a == 0 || b == 0 ? std::max(a, b) == infinite ? infinite : 0 : a + b; }

}  // namespace

bool StoreChoice::wants_sample(std::size_t bytes) {
  if (bytes < 2 * sample_bytes || ++copies_ < copies_per_sample) return false;
  copies_ = 0;
  return true;
}

void StoreChoice::add_sample(double cached_s, double bypassing_s) {
  const double difference = (cached_s - bypassing_s) / sample_bytes;
  const double limited = std::clamp(difference, -max_difference_s_per_byte, max_difference_s_per_byte);
  difference_s_per_byte_ += sample_weight * (limited - difference_s_per_byte_);
}

bool StoreChoice::bypasses() const { return difference_s_per_byte_ > worth_s_per_byte; }

void CopyCost::add(double s_per_byte, double weight) {
  if (average_ == 0) average_ = s_per_byte;
  average_ += weight * (std::min(s_per_byte, max_growth * average_) - average_);
}

CopyWay WayCosts::next(CopyWay best, const Allowed& allowed) const {
  const auto trial = trial_of(calls_, is_clear_);
  if (!trial) return best;
  std::array<CopyWay, copy_way_count> others;
  unsigned count = 0;
  for (const CopyWay way : all_ways)
    if (way != best && allowed[static_cast<std::size_t>(way)]) others[count++] = way;
  if (trial->cycle > 0 && count > 0) return trial->number == 0 ? others[trial->cycle % count] : best;
  return trial->number < count ? others[trial->number] : best;
}

void WayCosts::ended(CopyWay way, std::optional<double> s_per_byte) {
  CopyCost& cost = costs_[static_cast<std::size_t>(way)];
  if (const auto trial = trial_of(calls_, is_clear_)) {
    if (trial->call == 0) samples_ = 0;
    if (trial->call >= uncounted_calls && s_per_byte) trial_[samples_++] = *s_per_byte;
    if (trial->call + 1 == calls_of_trial && samples_ == trial_samples) {
      std::ranges::sort(trial_);
      const double found = trial_[trial_samples / 2];
      cost.add(found, found < cost.s_per_byte() ? 1 : trial_weight);
    }
  } else if (calls_ > trial_begin && s_per_byte) {
    cost.add(*s_per_byte, cost_weight);
  }
  ++calls_;
}

// In the middle of a cycle of either length, so that no trial is under way.
void WayCosts::set_clear(bool is_clear) {
  if (calls_ % long_cycle_calls == long_cycle_calls / 2) is_clear_ = is_clear;
}

// What is known of the next smaller size holds until more is.
CopyWay CallTuning::first_way(std::size_t bytes) const {
  const auto larger = sizes_.lower_bound(std::bit_width(bytes));
  return larger == sizes_.begin() ? CopyWay::ring : std::prev(larger)->second.best;
}

CopyWay CallTuning::way(std::size_t bytes) const {
  const auto found = sizes_.find(std::bit_width(bytes));
  if (found == sizes_.end()) return first_way(bytes);
  return found->second.costs.next(found->second.best, {true, true, false});
}

void CallTuning::ended(std::size_t bytes, std::optional<double> seconds) {
  const CopyWay went = way(bytes);
  Size& size = sizes_.try_emplace(std::bit_width(bytes), first_way(bytes)).first->second;
  size.costs.ended(went, seconds ? std::optional(*seconds / static_cast<double>(bytes)) : std::nullopt);
  const CopyWay other = size.best == CopyWay::ring ? CopyWay::cma : CopyWay::ring;
  const double found = size.costs.s_per_byte(other);
  size.costs.set_clear(found > clear_cost * size.costs.s_per_byte(size.best));
  if (found > 0 && found < change_worth * size.costs.s_per_byte(size.best)) size.best = other;
}

bool ChannelTuning::uses_cma(std::size_t bytes) const {
  if (bytes < min_cma_bytes || use_ == CmaUse::never) return false;
  return set_.value_or(way_) == CopyWay::cma;
}

void ChannelTuning::give_up() {
  use_ = CmaUse::never;
  way_ = CopyWay::ring;
  spoil();
}

// Where messages go one way at a time, the two copies of a ring overlap; else, as in collectives, they do not.
bool ChannelTuning::is_one_way() const { return messages_ && came_meanwhile_ <= two_way_limit * sent_lately_; }

// Two copies that no two processors make at once take longer than one, but who writes into a ring goes on without the
// reader.
CopyWay ChannelTuning::way_of_call(std::size_t bytes) const {
  if (!messages_ || !messages_->ring_calls) return calls_.way(bytes);
  const auto& [one_way_bytes, two_way_bytes] = *messages_->ring_calls;
  return bytes > (receives_meanwhile_ ? two_way_bytes : one_way_bytes) ? CopyWay::cma : CopyWay::ring;
}

void ChannelTuning::offer(std::span<const iovec> pieces) {
  if (set_ || left_bytes_ > 0 || use_ != CmaUse::measured) return;
  if (std::ranges::none_of(pieces, [](const iovec& piece) { return piece.iov_len >= min_cma_bytes; })) return;
  call_bytes_ = left_bytes_ = total_bytes(pieces);
  way_ = way_of_call(call_bytes_);
  is_spoiled_ = false;
  begin_ = Clock::now();
}

bool ChannelTuning::sent(std::span<const iovec> pieces, std::size_t bytes) {
  const bool ends = left_bytes_ > 0 && left_bytes_ <= bytes;
  left_bytes_ -= std::min(left_bytes_, bytes);
  if (!messages_) return ends;
  if (pieces.front().iov_base == sent_end_) {  // what came while a message went on
    const auto sent = static_cast<double>(bytes);
    const double kept = std::exp(-sent / two_way_bytes);
    sent_lately_ = kept * sent_lately_ + sent;
    came_meanwhile_ = kept * came_meanwhile_ + static_cast<double>(messages_->received - received_before_);
  }
  sent_end_ = end_of(pieces, bytes);
  received_before_ = messages_->received;
  return ends;
}

// What is in the ring yet is not paid for by half.
void ChannelTuning::end_call(std::size_t unread_bytes) {
  const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
  const auto all = static_cast<double>(call_bytes_);
  const double paid = all - static_cast<double>(std::min(unread_bytes, call_bytes_)) / 2;
  calls_.ended(call_bytes_, is_spoiled_ ? std::nullopt : std::optional(seconds * all / paid));
}

void ChannelTuning::received(std::size_t bytes) {
  if (messages_) messages_->received += bytes;
}

CopyVote::Costs CopyVote::Costs::operator+(const Costs& other) const {
  Costs total;
  for (std::size_t way = 0; way < of.size(); ++way) total.of[way] = sum(of[way], other.of[way]);
  return total;
}

CopyVote::Costs CopyVote::Ballot::costs(Memory memory) const {
  if (memory == ordinary) return {{ordinary_ring, ordinary_cma, infinite}};
  Costs costs;
  for (std::size_t way = 0; way < of_shared.size(); ++way) costs.of[way] = from_half(of_shared[way]);
  return costs;
}

bool CopyVote::concerns(std::size_t bytes, int ranks) {
  return ranks > 1 && bytes / static_cast<std::size_t>(ranks) >= min_cma_bytes;
}

CopyVote::Key CopyVote::key(int operation, std::size_t bytes, Memory memory) {
  return {operation, memory, static_cast<int>(std::bit_width(bytes))};
}

CopyVote::Size CopyVote::size(const Key& key) const {
  auto found = sizes_.lower_bound(key);
  if (found != sizes_.end() && found->first == key) return found->second;
  if (found == sizes_.begin()) return {};
  const auto& [smaller, state] = *--found;
  return smaller.operation == key.operation && smaller.memory == key.memory ? Size{state.preferred, {}} : Size{};
}

CopyWay CopyVote::preferred(const Size& size, Memory memory) const {
  const auto is_allowed = [&](CopyWay way) { return allowed_[memory][static_cast<std::size_t>(way)]; };
  // What is read in place is copied once less: mostly that is faster.
  const CopyWay wanted = size.preferred.value_or(memory == shared ? CopyWay::in_place : CopyWay::ring);
  for (const CopyWay way : {wanted, CopyWay::ring, CopyWay::in_place, CopyWay::cma})
    if (is_allowed(way)) return way;
  return CopyWay::ring;  // ranks that may not do what others must
}

CopyWay CopyVote::way(const Size& size, Memory memory) const {
  const CopyWay best = preferred(size, memory);
  const bool may_try = allowed_[memory][static_cast<std::size_t>(CopyWay::ring)];
  return may_try ? size.costs.next(best, allowed_[memory]) : best;
}

CopyWay CopyVote::way(int operation, std::size_t bytes, Memory memory) const {
  return way(size(key(operation, bytes, memory)), memory);
}

CopyVote::Ballot CopyVote::ballot(int operation, std::size_t bytes, bool is_shared, const Abilities& abilities) const {
  const auto limited = [&](Memory memory, CopyWay way) -> float {
    if (way == CopyWay::in_place && (!abilities.in_place || refused_calls_left_ > 0)) return infinite;
    if (way == CopyWay::cma && abilities.cma == CmaUse::never) return infinite;
    if (way == CopyWay::cma && abilities.cma == CmaUse::always) return 0;
    if (way == CopyWay::ring && abilities.cma == CmaUse::always) return infinite;
    return size(key(operation, bytes, memory)).costs.s_per_byte(way);
  };
  Ballot ballot{limited(ordinary, CopyWay::ring), limited(ordinary, CopyWay::cma), {}, is_shared};
  for (const CopyWay way : all_ways) ballot.of_shared[static_cast<std::size_t>(way)] = to_half(limited(shared, way));
  return ballot;
}

void CopyVote::ended(int operation, std::size_t bytes, Memory memory, double seconds, const Costs& total) {
  const Key known = key(operation, bytes, memory);
  Size& state = sizes_.try_emplace(known, size(known)).first->second;
  state.costs.ended(way(state, memory), seconds / static_cast<double>(bytes));
  if (refused_calls_left_ > 0) --refused_calls_left_;
  for (const CopyWay way : all_ways) allowed_[memory][static_cast<std::size_t>(way)] = total[way] != infinite;
  CopyWay best = preferred(state, memory);
  // By what all ranks know alike, as they try alike.
  state.costs.set_clear(std::ranges::all_of(
      all_ways, [&](CopyWay way) { return way == best || total[way] > static_cast<float>(clear_cost) * total[best]; }));
  for (const CopyWay way : all_ways) {
    if (total[way] == 0 || total[way] >= static_cast<float>(change_worth) * total[best]) continue;
    best = way;
    state.preferred = way;
  }
}

namespace {

// Below, it makes no difference (measured with cores 250 ns apart).
constexpr std::size_t min_bypass_bytes = 4096;
double copy_time_s(std::byte* destination, const std::byte* source, std::size_t bytes, bool bypass_cache) {
  const auto start = std::chrono::steady_clock::now();
  copy_stream(destination, source, bytes, bypass_cache);
  // A locked operation waits for the stores before it, which else take place after the clock is read.
  std::atomic<int> fence{0};
  fence.fetch_add(1, std::memory_order_seq_cst);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void RingCopy::operator()(std::byte* destination, const void* source, std::size_t bytes) {
  if (bytes < min_bypass_bytes) return copy_cached(destination, source, bytes);
  const auto* from = static_cast<const std::byte*>(source);
  if (choice_.wants_sample(bytes)) {
    constexpr std::size_t step = StoreChoice::sample_bytes;
    const double cached_s = copy_time_s(destination, from, step, /*bypass_cache=*/false);
    const double bypassing_s = copy_time_s(destination + step, from + step, step, /*bypass_cache=*/true);
    choice_.add_sample(cached_s, bypassing_s);
    destination += 2 * step;
    from += 2 * step;
    bytes -= 2 * step;
  }
  copy_stream(destination, from, bytes, bytes >= min_bypass_bytes && choice_.bypasses());
}

}  // namespace holmes
