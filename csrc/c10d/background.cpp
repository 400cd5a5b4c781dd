#include "background.hpp"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace holmes::torch_backend {
namespace {

// Grows when a task comes and nobody is free; a thread that finds nothing to do for a while ends.
class Pool {
public:
  void run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (tasks_.size() <= idle_) {
      filled_.notify_one();
      return;
    }
    try {
      std::thread([this] { serve(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {  // no more threads: one of ours takes it, or this one
      if (threads_ > 0) return;
      task = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      task();
    }
  }

private:
  void serve() {
    constexpr std::chrono::seconds linger{10};
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // what it holds may need the GIL to go
        lock.lock();
      }
      ++idle_;
      const bool is_filled = filled_.wait_for(lock, linger, [this] { return !tasks_.empty(); });
      --idle_;
      if (!is_filled) {
        --threads_;
        return;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<std::function<void()>> tasks_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;  // of these
};

}  // namespace

void run_in_background(std::function<void()> task) {
  static auto& pool = *new Pool;  // its threads may outlive static destruction
  pool.run(std::move(task));
}

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
