#include "background.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

namespace holmes::torch_backend {
namespace {

// Grows when a task comes and nobody is free; a thread that finds nothing to do for a while ends.
class Pool {
public:
  // Takes the one task of this list.
  void run(std::list<std::function<void()>> task) {
    std::unique_lock lock(mutex_);
    const auto place = task.begin();
    tasks_.splice(tasks_.end(), task);
    if (tasks_.size() <= idle_) {
      filled_.notify_one();
      return;
    }
    try {
      std::thread([this] { serve(); }).detach();
      ++threads_;
    } catch (const std::exception&) {  // no more threads, or no memory for one: one of ours takes it, or this one
      if (threads_ > 0) return;
      task.splice(task.begin(), tasks_, place);
      lock.unlock();
      task.front()();
    }
  }

private:
  void serve() {
    constexpr std::chrono::seconds linger{10};
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!tasks_.empty()) {
        std::list<std::function<void()>> task;
        task.splice(task.begin(), tasks_, tasks_.begin());
        lock.unlock();
        task.front()();
        task.clear();  // what it holds may need the GIL to go
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
  std::list<std::function<void()>> tasks_;
  std::size_t threads_ = 0;
  std::size_t idle_ = 0;  // of these
};

Pool& pool() {
  static auto& made = *new Pool;  // its threads may outlive static destruction
  return made;
}

}  // namespace

void run_in_background(std::function<void()> task) { BackgroundTask(std::move(task)).run(); }

BackgroundTask::BackgroundTask(std::function<void()> task) {
  pool();  // made here, where that may fail
  place_.push_back(std::move(task));
}

void BackgroundTask::run() { pool().run(std::move(place_)); }

void SerialQueue::run(std::function<void()> task) {
  BackgroundTask server([state = state_] { serve(state); });
  {
    const std::lock_guard lock(state_->mutex);
    state_->tasks.push_back(std::move(task));
    if (state_->is_running) return;
    state_->is_running = true;
  }
  server.run();
}

bool SerialQueue::await_idle(std::chrono::milliseconds timeout) const {
  std::unique_lock lock(state_->mutex);
  return state_->idle.wait_for(lock, timeout, [this] { return !state_->is_running; });
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
  state->idle.notify_all();
}

}  // namespace holmes::torch_backend
