#include "holmes/transport/shm/copy_tuning.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
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

// --- of one channel ---
// Where a copy through the kernel is the slower way it was up to 4 times as slow: a trial in so much costs 5 %.
constexpr std::size_t trials_apart = 64;
constexpr std::size_t trials_of_probation = 8;
// By so much the other way has to be cheaper. (Where only CMA had to be, two ranks that sent to each other stayed with
// the ring though it took 10 to 15 % longer.)
constexpr double change_worth = 0.95;
// Through a ring the sides wait for each other, beside the copies. (Messages of 16 MiB both ways, time over that of the
// copies: 1.04 with 2 ranks on 2 cores, 1.2 to 1.4 with 4; by CMA 1.0 and 1.05.)
constexpr double ring_waits = 1.1;
// By so much at most a trial is taken to mislead, and so much of it counts after one more.
constexpr double max_optimism = 4;
constexpr double optimism_kept = 0.95;
// As regions are opened one by one, and the two sides then wait for each other; those of trials are shorter.
constexpr std::size_t min_region_bytes = 2 * 1024 * 1024;
constexpr std::size_t max_region_bytes = 16 * 1024 * 1024;
// A copy that takes long was interrupted.
constexpr double cost_weight = 0.2;
constexpr double max_growth = 2;

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

// --- of a collective ---
// Of so many calls of a size, some go another way. The first one finds the caches filled by the better way and does
// not count, nor does the very first of all.
constexpr unsigned calls_per_cycle = 128;
constexpr unsigned trial_begin = 4;
constexpr unsigned calls_of_trial = 4;
constexpr unsigned uncounted_calls = 1;
// By so much the other way has to be faster, of a collective.
constexpr double vote_worth = 0.95;
constexpr float infinite = std::numeric_limits<float>::infinity();

constexpr std::array all_ways{CopyWay::ring, CopyWay::cma, CopyWay::in_place};

// Which trial a call is of that so many came before, and its place in it; absent: of none. At first every other way has
// one, later one of them in turns.
struct Trial {
  unsigned cycle;
  unsigned number;
  unsigned call;
};
std::optional<Trial> trial_of(unsigned calls) {
  const unsigned since = calls % calls_per_cycle - trial_begin;  // large: before the first
  const Trial trial{calls / calls_per_cycle, since / (2 * calls_of_trial), since % (2 * calls_of_trial)};
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

void CopyCost::add(std::size_t bytes, double seconds) {
  const double cost = seconds / static_cast<double>(bytes);
  const double share = window_bytes_ ? static_cast<double>(bytes) / static_cast<double>(window_bytes_) : cost_weight;
  const double weight = std::min(share, cost_weight);
  average_ = average_ == 0 ? cost : average_ + weight * (std::min(cost, max_growth * average_) - average_);
}

bool CmaChoice::uses_cma(std::size_t bytes, std::optional<CopyWay> set) const {
  if (bytes < min_cma_bytes || use_ == CmaUse::never) return false;
  return set ? *set == CopyWay::cma : use_ == CmaUse::always || is_better_ != is_trial_;
}

void CmaChoice::sent(std::size_t bytes, const WayCosts& costs) {
  if (use_ != CmaUse::measured) return;
  left_ -= std::min(left_, bytes);
  if (left_ > 0) return;
  if (is_trial_ && costs.ring > 0 && costs.cma > 0)
    end_trial(costs);
  else if (promised_ > 0)
    end_probation(costs);
  is_trial_ = !is_trial_;
  left_ = is_trial_ ? trial_bytes_ : (promised_ > 0 ? trials_of_probation : trials_apart) * trial_bytes_;
}

void CmaChoice::end_trial(const WayCosts& costs) {
  double& optimism = optimism_[!is_better_];
  if (optimism * of(!is_better_, costs) < change_worth * of(is_better_, costs)) {
    given_up_ = of(is_better_, costs);
    is_better_ = !is_better_;
    promised_ = of(is_better_, costs);
  } else {
    optimism = 1 + optimism_kept * (optimism - 1);
  }
}

void CmaChoice::end_probation(const WayCosts& costs) {
  const double cost = of(is_better_, costs);
  optimism_[is_better_] = std::clamp(cost / promised_, 1.0, max_optimism);
  promised_ = 0;
  if (cost > given_up_) is_better_ = !is_better_;
}

void CmaChoice::give_up() {
  use_ = CmaUse::never;
  is_better_ = false;
}

ChannelTuning::ChannelTuning(CmaUse use, std::size_t ring_bytes, CmaRegion::Costs* mine, const CmaRegion::Costs* theirs,
                             std::shared_ptr<MessageBytes> messages)
    : mine_(mine), theirs_(theirs), choices_{{use, ring_bytes}, {use, ring_bytes}}, messages_(std::move(messages)) {
  write_cost_ = CopyCost(4 * ring_bytes);  // half a trial
  ring_costs_.fill(write_cost_);
  cma_costs_.fill(write_cost_);
}

bool ChannelTuning::prefers_sender_memory() const {
  return set_ ? *set_ != CopyWay::ring : std::ranges::any_of(choices_, &CmaChoice::prefers_cma);
}

std::size_t ChannelTuning::region_bytes() const {
  return set_ ? max_region_bytes : std::clamp(choices_[traffic()].stretch_bytes(), min_region_bytes, max_region_bytes);
}

void ChannelTuning::give_up() {
  for (CmaChoice& choice : choices_) choice.give_up();
}

// Where messages go one way at a time, the two copies of a ring overlap; else, as in collectives, they do not.
ChannelTuning::Traffic ChannelTuning::traffic() const {
  return messages_ && came_meanwhile_ <= two_way_limit * sent_lately_ ? one_way : both_ways;
}

void ChannelTuning::offered(std::size_t bytes) {
  if (set_) return;
  const auto& theirs = theirs_[traffic()];
  const double read = theirs.ring.load(std::memory_order_relaxed);
  const double write = write_cost_.s_per_byte();
  const double copies = read > 0 && write > 0 ? ring_waits * (read + write) : 0;
  choices_[traffic()].sent(bytes, {traffic() == one_way ? read : copies, theirs.cma.load(std::memory_order_relaxed)});
}

void ChannelTuning::sent(std::span<const iovec> pieces, std::size_t bytes) {
  if (!messages_) return;
  messages_->sent += bytes;
  if (pieces.front().iov_base == sent_end_) {  // what came while a message went on
    const auto sent = static_cast<double>(bytes);
    const double kept = std::exp(-sent / two_way_bytes);
    sent_lately_ = kept * sent_lately_ + sent;
    came_meanwhile_ = kept * came_meanwhile_ + static_cast<double>(messages_->received - received_before_);
  }
  sent_end_ = end_of(pieces, bytes);
  received_before_ = messages_->received;
}

// From the piece before it in the same message on.
void ChannelTuning::received(std::span<const iovec> pieces, std::size_t bytes, bool by_cma, Clock::time_point start) {
  if (!messages_) return;
  messages_->received += bytes;
  const auto now = Clock::now();
  const bool goes_on = pieces.front().iov_base == received_end_ && by_cma == was_cma_;
  if (bytes >= min_timed_bytes && messages_->sent == sent_before_)
    add_cost(one_way, by_cma, bytes, std::chrono::duration<double>(now - (goes_on ? received_at_ : start)).count());
  received_end_ = end_of(pieces, bytes);
  received_at_ = now;
  was_cma_ = by_cma;
  sent_before_ = messages_->sent;
}

void ChannelTuning::add_cost(Traffic traffic, bool by_cma, std::size_t bytes, double seconds) {
  CopyCost& cost = (by_cma ? cma_costs_ : ring_costs_)[traffic];
  cost.add(bytes, seconds);
  auto& shared = mine_[traffic];
  (by_cma ? shared.cma : shared.ring).store(cost.s_per_byte(), std::memory_order_relaxed);
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
  return {operation, static_cast<int>(std::bit_width(bytes)), memory};
}

const CopyVote::Size& CopyVote::size(const Key& key) const {
  static const Size unknown;
  const auto found = sizes_.find(key);
  return found == sizes_.end() ? unknown : found->second;
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
  if (!allowed_[memory][static_cast<std::size_t>(CopyWay::ring)]) return best;
  const auto trial = trial_of(size.calls);
  if (!trial) return best;
  std::array<CopyWay, copy_way_count> others;
  unsigned count = 0;
  for (const CopyWay way : all_ways)
    if (way != best && allowed_[memory][static_cast<std::size_t>(way)]) others[count++] = way;
  if (trial->cycle > 0 && count > 0) return trial->number == 0 ? others[trial->cycle % count] : best;
  return trial->number < count ? others[trial->number] : best;
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
    return size(key(operation, bytes, memory)).costs[static_cast<std::size_t>(way)].s_per_byte();
  };
  Ballot ballot{limited(ordinary, CopyWay::ring), limited(ordinary, CopyWay::cma), {}, is_shared};
  for (const CopyWay way : all_ways) ballot.of_shared[static_cast<std::size_t>(way)] = to_half(limited(shared, way));
  return ballot;
}

void CopyVote::ended(int operation, std::size_t bytes, Memory memory, double seconds, const Costs& total) {
  Size& state = sizes_[key(operation, bytes, memory)];
  CopyCost& cost = state.costs[static_cast<std::size_t>(way(state, memory))];
  if (const auto trial = trial_of(state.calls)) {
    if (trial->call >= uncounted_calls)
      state.trial[trial->call - uncounted_calls] = seconds / static_cast<double>(bytes);
    if (trial->call + 1 == calls_of_trial) {
      std::ranges::sort(state.trial);
      cost.add(1, state.trial[trial_samples / 2]);
    }
  } else if (state.calls > 0) {
    cost.add(bytes, seconds);
  }
  ++state.calls;
  if (refused_calls_left_ > 0) --refused_calls_left_;
  for (const CopyWay way : all_ways) allowed_[memory][static_cast<std::size_t>(way)] = total[way] != infinite;
  CopyWay best = preferred(state, memory);
  for (const CopyWay way : all_ways) {
    if (total[way] == 0 || total[way] >= static_cast<float>(vote_worth) * total[best]) continue;
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
