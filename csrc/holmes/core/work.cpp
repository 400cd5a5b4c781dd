#include "holmes/core/work.hpp"

#include <thread>

#include "holmes/core/error.hpp"

namespace holmes {

void Work::wait(std::optional<Duration> timeout) {
  if (!is_final()) {
    mark_awaited();
    std::unique_lock lock(mutex_);
    const auto is_done = [this] { return is_final(); };
    if (!timeout) {
      final_.wait(lock, is_done);
    } else if (!final_.wait_for(lock, *timeout, is_done)) {
      throw TimeoutError("the operation is not finished after the " +
                         std::to_string(std::chrono::duration<double>(*timeout).count()) +
                         " s given to wait; it goes on, its buffers are still in use: wait again or abort");
    }
  }
  if (state() == WorkState::failed) std::rethrow_exception(error());
}

std::exception_ptr Work::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

Duration Work::elapsed() const {
  std::lock_guard lock(mutex_);
  return finished_.value_or(Clock::now()) - submitted_;
}

void Work::on_final(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!is_final()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Work::mark_running() {
  WorkState expected = WorkState::queued;
  state_.compare_exchange_strong(expected, WorkState::running);
}

void Work::complete(Clock::time_point now) { finish(WorkState::completed, nullptr, now); }
void Work::fail(std::exception_ptr error, Clock::time_point now) { finish(WorkState::failed, std::move(error), now); }

void Work::finish(WorkState state, std::exception_ptr error, Clock::time_point now) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (is_final()) return;
    error_ = std::move(error);
    finished_ = now;
    callbacks.swap(callbacks_);
    state_.store(state, std::memory_order_release);
    final_.notify_all();
  }
  for (auto& callback : callbacks) callback();
}

}  // namespace holmes
