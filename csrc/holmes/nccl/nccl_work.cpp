#include "holmes/nccl/nccl_work.hpp"

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes::nccl {
namespace {

// What a host that waits is woken by: the driver at the operation's end, or who fails it.
struct Arrival {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_there = false;

  void come() {
    std::lock_guard lock(mutex);
    is_there = true;
    changed.notify_all();
  }
  // False where `until` passes first.
  bool wait(std::optional<Clock::time_point> until) {
    std::unique_lock lock(mutex);
    const auto came = [this] { return is_there; };
    if (until) return changed.wait_until(lock, *until, came);
    changed.wait(lock, came);
    return true;
  }
};

[[noreturn]] void refuse_open_group() {
  throw UsageError("this operation starts when its group ends; end the group, then wait");
}

}  // namespace

void NcclWork::wait(std::optional<Duration> timeout) {
  const Place at = place();
  if (at.is_captured)
    throw UsageError(
        "this operation was captured into a CUDA graph and runs when the graph is launched; wait for the stream that "
        "launches it");
  if (!at.end && !is_final()) refuse_open_group();
  const auto start = Clock::now();
  if (!poll()) await_end(at.end, timeout, start);
  Work::wait(std::nullopt);
}

// No thread polls: the watchdog looks after deadlines and errors, and what it fails wakes this one too.
void NcclWork::await_end(const cuda::EventPtr& end, std::optional<Duration> timeout, Clock::time_point start) {
  mark_awaited();
  const auto arrival = std::make_shared<Arrival>();
  device_.when_reached(end, [arrival] { arrival->come(); });
  on_final([arrival] { arrival->come(); });
  const auto until = timeout ? std::optional(start + *timeout) : std::nullopt;
  while (!arrival->wait(earliest({until, SignalTimer().due()}))) {
    if (until && Clock::now() >= *until) return await_final(timeout, start);  // says so
    look_for_signals();
  }
  if (!is_final()) complete();
}

void NcclWork::wait_stream(void* stream) {
  if (state() == WorkState::failed) return Work::wait(std::nullopt);  // throws
  const Place at = place();
  if (!at.end) {
    if (is_final()) return;
    refuse_open_group();
  }
  if (stream == at.stream) return;  // one stream runs in order
  const cuda::CurrentDevice current(device_);
  const cuda::Driver& cuda = cuda::driver();
  cuda.check(cuda.stream_wait_event(stream, at.end.get(), 0), "let a stream wait for an NCCL operation");
  if (at.joined && stream == caller_) at.joined();
}

void NcclWork::join() {
  if (is_final() || place().end) wait_stream(caller_);
}

void NcclWork::mark_enqueued(cuda::Stream stream, cuda::EventPtr end, std::function<void()> joined) {
  std::lock_guard lock(place_mutex_);
  place_ = {stream, std::move(end), false, std::move(joined)};
  mark_running();
}

void NcclWork::mark_captured(cuda::Stream stream, cuda::EventPtr end, std::function<void()> joined) {
  {
    std::lock_guard lock(place_mutex_);
    place_ = {stream, std::move(end), true, std::move(joined)};
  }
  complete();
}

bool NcclWork::poll() {
  if (is_final() || !place().end) return is_final();
  const cuda::CurrentDevice current(device_);
  const cuda::RelaxedCapture no_part_of_any_capture;
  if (!has_ended()) return false;
  complete();
  return true;
}

bool NcclWork::has_ended() const {
  if (is_final()) return true;
  const cuda::EventPtr event = place().end;
  if (!event) return false;
  const cuda::Driver& cuda = cuda::driver();
  const cuda::Status status = cuda.event_query(event.get());
  if (status == cuda::not_ready || status == cuda::deinitialized) return false;
  cuda.check(status, "finish an NCCL operation");
  return true;
}

NcclWork::Place NcclWork::place() const {
  std::lock_guard lock(place_mutex_);
  return place_;
}

}  // namespace holmes::nccl
