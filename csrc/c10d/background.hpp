// run_in_background: a thread for callbacks that may block. BackgroundTask: one that is ready to. SerialQueue: tasks
// there, one after the other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

namespace holmes::torch_backend {

// Runs `task` soon, in a thread of this process that no earlier task blocks: a future's callbacks are user code (a DDP
// communication hook may wait for another collective, or for the GIL) and must stop neither the engine nor each other.
void run_in_background(std::function<void()> task);

// A task that has its place in the queue already: `run`, once, takes no memory, where there is none for a thread either
// the calling one runs it. So what others wait for begins whatever happens. The task must not throw.
class BackgroundTask {
public:
  explicit BackgroundTask(std::function<void()> task);
  void run();

private:
  std::list<std::function<void()>> place_;
};

// Tasks run in the order of `run`, each when the one before has returned; they may block and must not throw. What was
// queued runs also after the queue is gone. Thread-safe.
class SerialQueue {
public:
  void run(std::function<void()> task);
  // Waits until nothing is queued and nothing runs; returns whether that was so in time.
  bool await_idle(std::chrono::milliseconds timeout) const;

private:
  struct State {
    std::mutex mutex;
    std::condition_variable idle;
    std::deque<std::function<void()>> tasks;
    bool is_running = false;
  };
  static void serve(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace holmes::torch_backend
