#include "holmes/nccl/watchdog.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "holmes/core/thread.hpp"
#include "holmes/nccl/session.hpp"

namespace holmes::nccl {
namespace {

constexpr auto patience_at_exit = std::chrono::seconds(1);
// After what has just begun: nobody waits for a look at it.
constexpr auto first_look = std::chrono::milliseconds(5);

void stop_watchdog();

class Watchdog {
public:
  // The driver's own handler was registered before this one and runs after it.
  Watchdog() {
    std::atexit([] { stop_watchdog(); });
  }

  void add(const std::shared_ptr<Session>& session) {
    std::lock_guard lock(mutex_);
    sessions_.push_back(session);
    if (!started_) start_thread("watches NCCL's communicators", [this] { run(); }).detach();
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
    cuda::relax_captures();
    for (;;) {
      std::vector<std::shared_ptr<Session>> alive;
      {
        std::unique_lock lock(mutex_);
        const bool was_idle = !is_busy_;
        changed_.wait(lock, [this] { return is_busy_.load(); });
        if (was_idle) changed_.wait_for(lock, first_look);
        is_busy_ = false;
        std::erase_if(sessions_, [](const auto& session) { return session.expired(); });
        for (const auto& session : sessions_)
          if (auto one = session.lock()) alive.push_back(std::move(one));
      }
      std::optional<Clock::time_point> next;
      {
        const std::lock_guard round(round_);
        if (is_stopped_) return;
        for (const auto& session : alive) next = earliest({next, session->poll()});
        alive.clear();
      }
      if (next) {
        is_busy_ = true;
        std::this_thread::sleep_until(*next);
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
