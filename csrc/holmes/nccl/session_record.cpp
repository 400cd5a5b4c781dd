#include "holmes/nccl/session_record.hpp"

#include "holmes/record/registry.hpp"

namespace holmes::nccl {

SessionRecord::SessionRecord(std::string name, int rank, int size, std::size_t capacity) : recorder_(capacity) {
  identity_.name = std::move(name);
  identity_.backend = "nccl";
  identity_.rank = rank;
  identity_.size = size;
}

SessionRecord::~SessionRecord() {
  std::optional<CommunicatorRecord> last;
  if (identity_.failure) last = record(Clock::now());
  keep_after_end(metrics(), std::move(last));
}

void SessionRecord::introduce(const CommunicatorRecord& control) {
  std::lock_guard lock(mutex_);
  identity_.id = control.id + 1;  // random: another one has it with a probability of 2^-64
  identity_.ranks = control.ranks;
}

std::uint64_t SessionRecord::begin(const char* operation, const std::vector<Buffer>& buffers) {
  RecordedCall call;
  call.op = op_code_from_name(operation).value_or(OpCode::batch);
  if (!buffers.empty()) {
    call.dtype = buffers.front().dtype;
    call.count = buffers.front().count;
  }
  std::lock_guard lock(mutex_);
  call.sequence = call.is_collective() ? identity_.entered++ : next_p2p_++;
  return recorder_.add(call, WorkState::running, Clock::now());
}

void SessionRecord::finish(std::uint64_t number, bool succeeded) {
  std::lock_guard lock(mutex_);
  recorder_.finish(number, succeeded, Clock::now());
}

void SessionRecord::fail(const Failure& failure) {
  count_failure(identity_.name, failure.kind);
  std::lock_guard lock(mutex_);
  identity_.state = state();  // what it waited for
  identity_.failure = failure;
}

DriverState SessionRecord::state() const {
  DriverState state;
  state.taken = Clock::now();
  for (const RecordedOperation& operation : recorder_.operations()) {
    if (operation.state >= WorkState::completed) continue;
    ++state.pending_count;
    // What is behind it on the GPU waits, whether a thread does or not.
    if (state.pending.size() < max_pending)
      state.pending.push_back({operation.number, operation.call, true, true, operation.queued, {}});
  }
  return state;
}

CommunicatorRecord SessionRecord::record(Clock::time_point) {
  std::lock_guard lock(mutex_);
  CommunicatorRecord record = identity_;
  record.operations = recorder_.operations();
  if (!record.failure) record.state = state();
  return record;
}

CommunicatorMetrics SessionRecord::metrics() {
  return {identity_.name, {}, recorder_.totals(), recorder_.oldest_unfinished()};
}

}  // namespace holmes::nccl
