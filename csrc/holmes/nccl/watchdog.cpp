#include "holmes/nccl/watchdog.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "holmes/nccl/session.hpp"

namespace holmes::nccl {
namespace {

constexpr auto patience_at_exit = std::chrono::seconds(1);

void stop_watchdog();

// Only callbacks and errors wait for a poll: whoever waits for an operation polls on its own.
constexpr auto poll_interval = std::chrono::milliseconds(1);

class Watchdog {
public:
  // The driver's own handler was registered before this one and runs after it.
  Watchdog() {
    std::atexit([] { stop_watchdog(); });
  }

  void add(const std::shared_ptr<Session>& session) {
    std::lock_guard lock(mutex_);
    sessions_.push_back(session);
    if (!started_) std::thread([this] { run(); }).detach();
    started_ = true;
  }

  void wake() {
    if (is_busy_.exchange(true)) return;
    std::lock_guard lock(mutex_);
    changed_.notify_one();
  }

  // Asks nothing of the driver any more.
  void stop() {
    is_stopped_ = true;
    std::unique_lock round(round_, std::defer_lock);
    static_cast<void>(round.try_lock_for(patience_at_exit));
  }

private:
  void run() {
    for (;;) {
      std::vector<std::shared_ptr<Session>> alive;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return is_busy_.load(); });
        is_busy_ = false;
        std::erase_if(sessions_, [](const auto& session) { return session.expired(); });
        for (const auto& session : sessions_)
          if (auto one = session.lock()) alive.push_back(std::move(one));
      }
      bool any_pending = false;
      {
        const std::lock_guard round(round_);
        if (is_stopped_) return;
        for (const auto& session : alive) any_pending |= session->poll();
        alive.clear();
      }
      if (any_pending) {
        is_busy_ = true;
        std::this_thread::sleep_for(poll_interval);
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> is_busy_{false};
  std::timed_mutex round_;  // held while sessions are polled
  std::atomic<bool> is_stopped_{false};
  std::vector<std::weak_ptr<Session>> sessions_;
  bool started_ = false;
};

// Never destroyed: its thread goes on to the end of the process.
Watchdog& watchdog() {
  static auto* const made = new Watchdog();
  return *made;
}

void stop_watchdog() { watchdog().stop(); }

}  // namespace

void watch(const std::shared_ptr<Session>& session) { watchdog().add(session); }
void wake_watchdog() { watchdog().wake(); }

}  // namespace holmes::nccl
