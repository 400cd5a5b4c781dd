#include "serial_queue.hpp"

#include "background.hpp"

namespace holmes::torch_backend {

void SerialQueue::run(std::function<void()> task) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    if (state_->is_running) return;
    state_->is_running = true;
  }
  run_in_background([state = state_] { serve(state); });
}

bool SerialQueue::is_idle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->is_running;
}

void SerialQueue::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (!state->tasks.empty()) {
    auto task = std::move(state->tasks.front());
    state->tasks.pop_front();
    lock.unlock();
    task();
    task = nullptr;  // what it holds may need the GIL to go
    lock.lock();
  }
  state->is_running = false;
}

}  // namespace holmes::torch_backend
