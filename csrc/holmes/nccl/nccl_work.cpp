#include "holmes/nccl/nccl_work.hpp"

#include <thread>

#include "holmes/core/error.hpp"

namespace holmes::nccl {
namespace {

// An event wakes nobody. Short operations are worth polling for, for long ones a nap costs little.
constexpr auto spin_time = std::chrono::microseconds(50);
constexpr auto nap = std::chrono::microseconds(50);

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
  while (!is_final()) {
    if (poll()) break;
    const auto waited = Clock::now() - start;
    if (timeout && waited >= *timeout) return await_final(timeout, start);  // says so
    if (waited < spin_time)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(nap);
  }
  Work::wait(std::nullopt);
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
  const cuda::EventPtr event = place().end;
  if (is_final() || !event) return is_final();
  const cuda::CurrentDevice current(device_);
  const cuda::RelaxedCapture no_part_of_any_capture;
  const cuda::Driver& cuda = cuda::driver();
  const cuda::Status status = cuda.event_query(event.get());
  if (status == cuda::not_ready || status == cuda::deinitialized) return false;
  cuda.check(status, "finish an NCCL operation");
  complete();
  return true;
}

NcclWork::Place NcclWork::place() const {
  std::lock_guard lock(place_mutex_);
  return place_;
}

}  // namespace holmes::nccl
