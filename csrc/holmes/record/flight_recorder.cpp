#include "holmes/record/flight_recorder.hpp"

#include <algorithm>
#include <bit>

namespace holmes {
namespace {

constexpr std::uint64_t state_bits = 2;
constexpr std::uint64_t state_mask = (1u << state_bits) - 1;
constexpr std::uint8_t not_reduced = 255;
constexpr std::int32_t no_peer = -1;  // in the slot only

std::uint64_t word_of(std::uint64_t number, WorkState state) {
  return number << state_bits | static_cast<std::uint64_t>(state);
}

std::uint64_t pack(const RecordedCall& call) {
  const auto rank = static_cast<std::uint32_t>((call.is_collective() ? call.root : call.peer).value_or(no_peer));
  const std::uint64_t reduction = call.reduction ? static_cast<std::uint8_t>(*call.reduction) : not_reduced;
  return static_cast<std::uint64_t>(call.op) | static_cast<std::uint64_t>(call.dtype) << 8 | reduction << 16 |
         static_cast<std::uint64_t>(rank) << 32;
}

RecordedCall unpack(std::uint64_t what, std::uint64_t position, std::uint64_t count) {
  RecordedCall call;
  call.op = static_cast<OpCode>(what & 0xff);
  call.dtype = static_cast<DType>(what >> 8 & 0xff);
  if (const auto reduction = static_cast<std::uint8_t>(what >> 16); reduction != not_reduced)
    call.reduction = static_cast<ReduceOp>(reduction);
  if (const auto rank = static_cast<std::int32_t>(what >> 32); rank != no_peer)
    (call.is_collective() ? call.root : call.peer) = rank;
  call.sequence = call.is_collective() ? position : position & 0xffffffff;
  if (!call.is_collective()) call.tag = static_cast<std::uint32_t>(position >> 32);
  call.count = count;
  return call;
}

std::int64_t to_ns(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

Clock::time_point from_ns(std::int64_t ns) { return Clock::time_point(std::chrono::nanoseconds(ns)); }

// Not atomic as a whole: one thread at a time writes.
void add_to(std::atomic<std::uint64_t>& total, std::uint64_t amount) {
  total.store(total.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

FlightRecorder::FlightRecorder(std::size_t capacity)
    : capacity_(capacity ? std::bit_ceil(capacity) : 0),
      slots_(capacity_ ? std::make_unique<Slot[]>(capacity_) : nullptr) {}

std::uint64_t FlightRecorder::add(const RecordedCall& call, WorkState state, Clock::time_point now) {
  if (!is_on()) return 0;
  const std::uint64_t number = last_.load(std::memory_order_relaxed) + 1;
  Slot& slot = slot_of(number);
  // A reader that sees one of the new values below also sees that the slot is no longer the old operation's.
  slot.word.store(0, std::memory_order_relaxed);
  slot.what.store(pack(call), std::memory_order_release);
  slot.position.store(call.is_collective() ? call.sequence : static_cast<std::uint64_t>(call.tag) << 32 | call.sequence,
                      std::memory_order_release);
  slot.count.store(call.count, std::memory_order_release);
  slot.queued_ns.store(to_ns(now), std::memory_order_release);
  slot.started_ns.store(to_ns(now), std::memory_order_release);
  slot.word.store(word_of(number, state), std::memory_order_release);
  last_.store(number, std::memory_order_release);
  return number;
}

void FlightRecorder::set_state(Slot& slot, std::uint64_t number, WorkState state) {
  // Where more operations are pending than are kept, the slot is another one's by now.
  std::uint64_t word = slot.word.load(std::memory_order_relaxed);
  while (word >> state_bits == number &&
         !slot.word.compare_exchange_weak(word, word_of(number, state), std::memory_order_release,
                                          std::memory_order_relaxed)) {
  }
}

void FlightRecorder::start(std::uint64_t number, Clock::time_point now) {
  if (number == 0) return;
  Slot& slot = slot_of(number);
  if (slot.word.load(std::memory_order_relaxed) != word_of(number, WorkState::queued)) return;
  slot.started_ns.store(to_ns(now), std::memory_order_release);
  set_state(slot, number, WorkState::running);
}

void FlightRecorder::finish(std::uint64_t number, bool succeeded, Clock::time_point now) {
  if (number == 0) return;
  Slot& slot = slot_of(number);
  const std::uint64_t word = slot.word.load(std::memory_order_relaxed);
  if (word >> state_bits != number || (word & state_mask) >= static_cast<std::uint64_t>(WorkState::completed)) return;
  const std::uint64_t what = slot.what.load(std::memory_order_relaxed);
  Totals& totals = totals_[what & 0xff];
  if (succeeded) {
    add_to(totals.completed, 1);
    add_to(totals.bytes, slot.count.load(std::memory_order_relaxed) * size_bytes(static_cast<DType>(what >> 8 & 0xff)));
    add_to(totals.ns, static_cast<std::uint64_t>(to_ns(now) - slot.queued_ns.load(std::memory_order_relaxed)));
  } else {
    add_to(totals.failed, 1);
  }
  slot.finished_ns.store(to_ns(now), std::memory_order_release);
  set_state(slot, number, succeeded ? WorkState::completed : WorkState::failed);
}

std::vector<RecordedOperation> FlightRecorder::operations() const {
  std::vector<RecordedOperation> found;
  const std::uint64_t last = last_.load(std::memory_order_acquire);
  for (std::uint64_t number = last > capacity_ ? last - capacity_ + 1 : 1; number <= last; ++number) {
    const Slot& slot = slot_of(number);
    const std::uint64_t word = slot.word.load(std::memory_order_acquire);
    const std::uint64_t what = slot.what.load(std::memory_order_acquire);
    const std::uint64_t position = slot.position.load(std::memory_order_acquire);
    const std::uint64_t count = slot.count.load(std::memory_order_acquire);
    const auto queued = from_ns(slot.queued_ns.load(std::memory_order_acquire));
    const auto started = from_ns(slot.started_ns.load(std::memory_order_acquire));
    const auto finished = from_ns(slot.finished_ns.load(std::memory_order_acquire));
    if (word >> state_bits != number || slot.word.load(std::memory_order_relaxed) >> state_bits != number) continue;
    RecordedOperation operation{
        number, unpack(what, position, count), static_cast<WorkState>(word & state_mask), queued, {}, {}};
    const bool is_final = operation.state >= WorkState::completed;
    if (operation.state == WorkState::running || operation.state == WorkState::completed) operation.started = started;
    if (is_final) operation.finished = finished;
    found.push_back(operation);
  }
  return found;
}

std::optional<RecordedOperation> FlightRecorder::oldest_unfinished() const {
  const auto kept = operations();
  const auto found = std::ranges::find_if(kept, [](const auto& operation) { return !operation.finished; });
  return found == kept.end() ? std::nullopt : std::optional(*found);
}

std::array<OperationTotals, op_code_count> FlightRecorder::totals() const {
  std::array<OperationTotals, op_code_count> result;
  for (std::size_t i = 0; i < op_code_count; ++i)
    result[i] = {totals_[i].completed.load(std::memory_order_relaxed),
                 totals_[i].failed.load(std::memory_order_relaxed), totals_[i].bytes.load(std::memory_order_relaxed),
                 totals_[i].ns.load(std::memory_order_relaxed)};
  return result;
}

}  // namespace holmes
