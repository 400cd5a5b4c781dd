#include "work_holmes.hpp"

#include <algorithm>
#include <iterator>

#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "background.hpp"
#include "device_stream.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "torch_error.hpp"

namespace holmes::torch_backend {
namespace {

constexpr auto longest_wait = std::chrono::hours(24 * 365 * 100);  // that a Duration from now on can be

}  // namespace

void WorkHolmes::start(std::vector<WorkPtr> parts, std::uint64_t sequence) {
  parts_ = std::move(parts);
  sequence_ = sequence;
  started_ = true;
  if (!recordFunctionEndCallback_) return;
  if (device_)
    recordFunctionEndCallback_();  // as ProcessGroupNCCL's: the profiler sees the GPU's part by itself
  else
    on_all_final(std::move(recordFunctionEndCallback_));
}

void WorkHolmes::add(Operands operands) {
  std::ranges::move(operands.written, std::back_inserter(outputs_));
  std::ranges::move(operands.copies, std::back_inserter(copies_));
}

void WorkHolmes::check_started() const {
  if (!started_)
    throw UsageError("this operation starts when its coalescing block ends; wait for the block's work instead");
}

bool WorkHolmes::all_final() const {
  return started_ && std::ranges::all_of(parts_, [](const WorkPtr& part) { return part->is_final(); });
}

std::exception_ptr WorkHolmes::first_error() const {
  for (const auto& part : parts_)
    if (auto error = part->error()) return error;
  return nullptr;
}

bool WorkHolmes::isCompleted() {
  if (!all_final()) return false;
  if (!first_error() && !device_) deliver();
  return true;
}

bool WorkHolmes::isSuccess() const { return all_final() && !first_error(); }

std::exception_ptr WorkHolmes::exception() const {
  auto error = first_error();
  return error ? as_torch_error(error) : nullptr;
}

int WorkHolmes::sourceRank() const { return parts_.size() == 1 ? parts_.front()->source_rank() : rank_; }

std::vector<at::Tensor> WorkHolmes::result() { return outputs_; }

void WorkHolmes::synchronize() { wait(); }

void WorkHolmes::blockCurrentStream() {
  if (!device_) return ::c10d::Work::blockCurrentStream();
  translated([&] {
    check_started();
    wait_on_stream();
  });
}

bool WorkHolmes::wait(std::chrono::milliseconds timeout) {
  translated([&] {
    check_started();
    if (device_) {
      wait_on_stream();
      if (timeout == kNoTimeout && !host_waits_) return;
    }
    const auto deadline = Clock::now() + std::min<std::chrono::milliseconds>(timeout, longest_wait);
    for (const auto& part : parts_) {
      std::optional<Duration> left;
      if (timeout != kNoTimeout) left = std::max(Duration::zero(), Duration(deadline - Clock::now()));
      part->wait(left);
    }
  });
  if (!device_) deliver();
  return true;
}

void WorkHolmes::wait_on_stream() {
  void* const stream = current_stream(*device_);
  for (const auto& part : parts_) part->wait_stream(stream);
  deliver();
  if (delivered_event_) delivered_event_->block(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
}

void WorkHolmes::deliver() {
  std::call_once(delivered_, [this] {
    if (copies_.empty()) return;
    const at::NoGradGuard no_grad;
    for (auto& copy : copies_) {
      // Whoever waits need not be in inference mode himself, outside of which its tensors may not be written to. In it,
      // others would forget that they were.
      std::optional<c10::InferenceMode> inference;
      if (copy.target.is_inference()) inference.emplace();
      copy.target.copy_(copy.source, /*non_blocking=*/device_.has_value());
    }
    if (device_) {
      const c10::Stream stream = c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_);
      // Freed memory goes back to the stream that it was allocated on.
      for (auto& copy : copies_) copy.source.record_stream(stream);
      delivered_event_.emplace(device_->type());
      delivered_event_->record(stream);
    }
    copies_.clear();
  });
}

c10::intrusive_ptr<c10::ivalue::Future> WorkHolmes::device_future() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{*device_});
  if (auto error = exception()) {
    future->setError(error);
    return future;
  }
  // The future remembers the current stream's place: one of torch's own, behind the operation.
  const c10::StreamGuard side(c10::impl::VirtualGuardImpl(device_->type()).getStreamFromGlobalPool(*device_));
  wait_on_stream();
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

void WorkHolmes::on_all_final(std::function<void()> callback) {
  if (parts_.empty()) return callback();
  auto remaining = std::make_shared<std::atomic<std::size_t>>(parts_.size());
  auto shared_callback = std::make_shared<std::function<void()>>(std::move(callback));
  for (const auto& part : parts_)
    part->on_final([remaining, shared_callback] {
      if (remaining->fetch_sub(1) == 1) (*shared_callback)();
    });
}

c10::intrusive_ptr<c10::ivalue::Future> WorkHolmes::getFuture() {
  translated([&] { check_started(); });
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    if (device_) {
      translated([&] { future_ = device_future(); });
      return future_;
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  }
  if (all_final()) {
    finish_future();
    return future_;
  }
  try {
    auto self = c10::intrusive_ptr<WorkHolmes>::unsafe_reclaim_from_nonowning(this);
    // Made now: where memory is short when the operation ends, the future is completed all the same.
    auto task = std::make_shared<BackgroundTask>([self] { self->finish_future(); });
    on_all_final([task] { task->run(); });
  } catch (const std::exception&) {  // the task will not run; another thread may have the future already
    end_future(std::current_exception(), {});
  }
  return future_;
}

void WorkHolmes::finish_future() {
  std::exception_ptr error;
  c10::IValue outputs;
  try {
    error = exception();
    if (!error) deliver(), outputs = c10::IValue(outputs_);
  } catch (const std::exception&) {  // no memory for what the future is to hold
    error = std::current_exception();
  }
  end_future(error, std::move(outputs));
}

void WorkHolmes::end_future(const std::exception_ptr& error, c10::IValue outputs) {
  try {
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(std::move(outputs));
  } catch (const std::exception& problem) {  // of a callback: the future is complete before they run
    where_memory_allows([&] {
      log(LogLevel::error, std::nullopt, std::string("what follows an operation's future failed: ") + problem.what());
    });
  }
}

float WorkHolmes::getDuration() const {
  Duration longest{};
  for (const auto& part : parts_) longest = std::max(longest, part->elapsed());
  return std::chrono::duration<float, std::milli>(longest).count();
}

}  // namespace holmes::torch_backend
