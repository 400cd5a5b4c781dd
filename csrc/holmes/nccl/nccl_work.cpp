#include "holmes/nccl/nccl_work.hpp"

#include <thread>

namespace holmes::nccl {
namespace {

// An event wakes nobody. Short operations are worth polling for, for long ones a nap costs little.
constexpr auto spin_time = std::chrono::microseconds(50);
constexpr auto nap = std::chrono::microseconds(50);

}  // namespace

void NcclWork::wait(std::optional<Duration> timeout) {
  const auto start = Clock::now();
  while (!is_final()) {
    if (end() && poll()) break;
    const auto waited = Clock::now() - start;
    if (timeout && waited >= *timeout) return Work::wait(Duration::zero());  // says so
    if (waited < spin_time)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(nap);
  }
  Work::wait(std::nullopt);
}

void NcclWork::wait_stream(void* stream) {
  if (state() == WorkState::failed) return Work::wait(std::nullopt);  // throws
  const cuda::EventPtr event = end();
  if (!event) return;
  const cuda::CurrentDevice current(device_);
  const cuda::Driver& cuda = cuda::driver();
  cuda.check(cuda.stream_wait_event(stream, event.get(), 0), "let a stream wait for an NCCL operation");
}

void NcclWork::mark_enqueued(cuda::EventPtr end) {
  std::lock_guard lock(end_mutex_);
  end_ = std::move(end);
  mark_running();
}

bool NcclWork::poll() {
  const cuda::EventPtr event = end();
  if (is_final() || !event) return is_final();
  const cuda::CurrentDevice current(device_);
  const cuda::Driver& cuda = cuda::driver();
  const cuda::Status status = cuda.event_query(event.get());
  if (status == cuda::not_ready) return false;
  cuda.check(status, "finish an NCCL operation");
  complete();
  return true;
}

cuda::EventPtr NcclWork::end() const {
  std::lock_guard lock(end_mutex_);
  return end_;
}

}  // namespace holmes::nccl
