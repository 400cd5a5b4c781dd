// SerialQueue: tasks in the background, one after the other.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace holmes::torch_backend {

// Tasks run in the order of `run`, each when the one before has returned; they may block and must not throw. What was
// queued runs also after the queue is gone. Thread-safe.
class SerialQueue {
public:
  void run(std::function<void()> task);
  bool is_idle() const;

private:
  struct State {
    std::mutex mutex;
    std::deque<std::function<void()>> tasks;
    bool is_running = false;
  };
  static void serve(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace holmes::torch_backend
