// FlightRecorder: the last operations of one communicator, kept in a ring of fixed size, and totals of all of them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "holmes/core/types.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// One operation, as its caller asked for it.
struct RecordedCall {
  OpCode op = OpCode::barrier;
  DType dtype = DType::uint8;
  std::optional<ReduceOp> reduction{};
  std::optional<int> peer{};   // of a send or receive; a receive from any rank has none
  std::optional<int> root{};   // of a collective
  std::uint64_t sequence = 0;  // collectives: number among them, equal on all ranks; else: among this rank's sends and
                               // receives
  std::uint32_t tag = 0;       // of a send or receive
  std::uint64_t count = 0;     // elements of this rank's buffer

  bool is_collective() const { return op <= OpCode::split; }
};

struct RecordedOperation {
  std::uint64_t number = 0;  // from 1, in the order of the calls
  RecordedCall call;
  WorkState state = WorkState::queued;
  Clock::time_point queued{};
  std::optional<Clock::time_point> started{};
  std::optional<Clock::time_point> finished{};
};

// Of all operations of one kind that ended.
struct OperationTotals {
  std::uint64_t completed = 0;
  std::uint64_t failed = 0;
  std::uint64_t bytes = 0;  // of this rank's buffers, completed ones
  std::uint64_t ns = 0;     // from call to end, completed ones
};

// Thread-safe. Nothing is allocated after construction and nobody waits: a reader skips what is just being overwritten.
class FlightRecorder {
public:
  // Keeps the last `capacity` operations, rounded up to a power of two; 0: none, everything here does nothing.
  explicit FlightRecorder(std::size_t capacity);

  bool is_on() const { return capacity_ > 0; }
  // Records a call; returns its number (0 where off). Calls of several threads must be put in order by the caller.
  std::uint64_t add(const RecordedCall& call, WorkState state, Clock::time_point now);
  // What happened to it since. For each operation, by one thread at a time.
  void start(std::uint64_t number, Clock::time_point now);
  void finish(std::uint64_t number, bool succeeded, Clock::time_point now);

  // What is kept, oldest first.
  std::vector<RecordedOperation> operations() const;
  // Of these, the first that has not ended.
  std::optional<RecordedOperation> oldest_unfinished() const;
  std::array<OperationTotals, op_code_count> totals() const;

private:
  // A cache line. `word`: number and state; 0 while the rest is being written.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> word{0};
    std::atomic<std::uint64_t> what{0};  // operation, dtype, reduction and (in the upper half) peer or root
    std::atomic<std::uint64_t> position{0};
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::int64_t> queued_ns{0};
    std::atomic<std::int64_t> started_ns{0};
    std::atomic<std::int64_t> finished_ns{0};
  };
  struct Totals {
    std::atomic<std::uint64_t> completed{0};
    std::atomic<std::uint64_t> failed{0};
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<std::uint64_t> ns{0};
  };

  Slot& slot_of(std::uint64_t number) const { return slots_[(number - 1) & (capacity_ - 1)]; }
  void set_state(Slot& slot, std::uint64_t number, WorkState state);

  std::size_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<std::uint64_t> last_{0};  // number
  std::array<Totals, op_code_count> totals_{};
};

}  // namespace holmes
