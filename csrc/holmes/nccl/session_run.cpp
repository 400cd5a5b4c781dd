// How a Session puts operations on its device: behind what their buffers' streams have, and in one order with those of
// other communicators.
#include <algorithm>

#include "holmes/nccl/session.hpp"
#include "holmes/nccl/watchdog.hpp"

namespace holmes::nccl {
namespace {

constexpr auto patience_with_nccl = std::chrono::seconds(10);  // for a thread inside NCCL

std::string seconds_text(Duration time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text + " s";
}

}  // namespace

// Every stream on which one of the buffers is ready.
void Session::begin_behind(const Operation& operation, cuda::Stream stream) const {
  std::vector<cuda::Stream> seen{stream};
  for (const Buffer& buffer : operation.buffers) {
    if (std::ranges::find(seen, buffer.stream) != seen.end()) continue;
    seen.push_back(buffer.stream);
    const cuda::EventPtr ready = device_.take_event();
    const cuda::Driver& cuda = cuda::driver();
    cuda.check(cuda.event_record(ready.get(), buffer.stream), "record a CUDA event");
    cuda.check(cuda.stream_wait_event(stream, ready.get(), 0), "let NCCL's stream wait");
  }
}

// Side by side, each of two operations may hold what the other needs. Those of one NCCL it orders itself, where it can;
// those of two images, or of one communicator on two streams, nobody else orders.
void Session::keep_order(cuda::Stream stream, const std::optional<unsigned long long>& capture) const {
  const cuda::Device::Last& on_device = capture ? device_.last_captured : device_.last;
  const bool is_ordered = options_.library_orders && on_device.library == &api_;
  const cuda::EventPtr* waited = nullptr;
  for (const cuda::Device::Last* last : {is_ordered ? nullptr : &on_device, capture ? &last_captured_ : &last_}) {
    if (last == nullptr || !last->end || last->stream == stream || (capture && last->capture_id != *capture)) continue;
    if (waited != nullptr && *waited == last->end) continue;
    const cuda::Driver& cuda = cuda::driver();
    cuda.check(cuda.stream_wait_event(stream, last->end.get(), 0), "order NCCL operations on a device");
    waited = &last->end;
  }
}

std::shared_ptr<NcclWork> Session::run(Operation operation) {
  const auto deadline = Clock::now() + operation.timeout;
  throw_if_dead();
  const cuda::Driver& cuda = cuda::driver();
  const cuda::CurrentDevice current(device_);
  const cuda::Stream caller = operation.buffers.empty() ? nullptr : operation.buffers.front().stream;
  auto work = operation.work ? operation.work : std::make_shared<NcclWork>(device_, caller);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_until(deadline))
    fail_and_throw(ErrorKind::timeout, place() + ": " + operation.name + " did not begin within " +
                                           seconds_text(operation.timeout) +
                                           ": another thread is inside NCCL on this device");
  throw_if_dead();
  const auto capture = cuda::capture_of(caller);
  const cuda::Stream stream = operation.on_callers_stream ? caller : stream_;
  begin_behind(operation, stream);
  keep_order(stream, capture);

  ++sequence_;
  const std::uint64_t record = capture ? 0 : record_->begin(operation.name, operation.buffers);
  const auto what = [&] { return std::string(operation.name) + " (operation " + std::to_string(sequence_) + ")"; };
  Result result = api_.group_start();
  if (result == success) {
    result = operation.enqueue(comm_, stream);
    const Result ended = api_.group_end();
    if (result == success || result == in_progress) result = ended;
  }
  if (result == in_progress) result = wait_while_in_progress(what().c_str(), result, deadline);
  if (result != success) record_->finish(record, false);
  if (result == invalid_argument)
    throw UsageError(place() + ": NCCL refuses " + what() + ": " + api_.describe(result), {.rank = options_.rank});
  if (result != success)
    fail_and_throw(ErrorKind::communicator, place() + ": " + what() + " failed: " + api_.describe(result));

  cuda::EventPtr end = device_.take_event();
  cuda.check(cuda.event_record(end.get(), stream), "record a CUDA event");
  if (capture) {
    // It runs when the graph does; events of a capture cannot be asked.
    device_.last_captured = last_captured_ = {&api_, stream, end, *capture};
    work->mark_captured(stream, std::move(end));
    return work;
  }
  device_.last = last_ = {&api_, stream, end, 0};
  work->mark_enqueued(stream, std::move(end));
  const std::uint64_t number = sequence_;
  issue.unlock();
  {
    std::lock_guard lock(mutex_);
    if (dead_) {
      record_->finish(record, false);
      work->fail(error_of(failure_));
      return work;
    }
    pending_.push_back({work, std::move(operation.buffers), deadline, operation.name, number, record});
  }
  wake_watchdog();
  return work;
}

void Session::call(const char* what, const std::function<Result(Comm comm)>& function) {
  throw_if_dead();
  const cuda::CurrentDevice current(device_);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_for(patience_with_nccl))
    throw TimeoutError(place() + ": " + what + " did not begin within " + seconds_text(patience_with_nccl) +
                           ": another thread is inside NCCL on this device",
                       {.rank = options_.rank, .host = options_.host});
  throw_if_dead();
  const Result result = function(comm_);
  if (result != success)
    throw UsageError(place() + ": " + what + " failed: " + api_.describe(result), {.rank = options_.rank});
}

}  // namespace holmes::nccl
