// IoThread: moves the bytes of asynchronous operations. Shared by many communicators, asleep when idle. How many there
// are in this process, on which processors, and which communicator gets which.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

class Engine;

// poll() until something is ready or `until` (absent: no limit). False where a signal ended it.
bool poll_until(std::vector<pollfd>& fds, std::optional<Clock::time_point> until);

// Thread-safe. Never destroyed.
class IoThread {
public:
  // Thread "holmes-io-`number`", on these processors; empty: the kernel decides. Throws SystemError.
  IoThread(int number, const std::vector<int>& cpus);
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;
  // Drives `engine` until it has nothing pending.
  void add(std::shared_ptr<Engine> engine);
  // As add, but after `patience`, and then calls Driver::offer_expired: who started an operation often waits for it at
  // once, and drives it better than a thread that has to be woken first.
  void offer(std::shared_ptr<Engine> engine, Duration patience);
  // The caller drives `engine` itself.
  void take_back(const Engine& engine);
  // Looks after `engine` (see Engine::maintain) until it needs it no more.
  void watch(std::shared_ptr<Engine> engine);

private:
  void run();
  bool round(std::vector<pollfd>& fds, std::optional<Clock::time_point>& wake_at);
  void maintain(std::optional<Clock::time_point>& wake_at);
  void wake() const;
  // With the lock.
  void take_offers();
  void set_timer(Clock::time_point at);

  struct Offer {
    std::shared_ptr<Engine> engine;
    Clock::time_point due;
  };
  struct Maintained {
    std::shared_ptr<Engine> engine;
    Clock::time_point at{};
  };

  UniqueFd wake_fd_;
  UniqueFd timer_fd_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Engine>> added_;
  std::vector<Offer> offers_;
  Clock::time_point timer_at_ = Clock::time_point::max();  // not later than any offer; max: not armed
  std::vector<std::shared_ptr<Engine>> watched_;           // since the last round
  std::vector<Maintained> maintained_;                     // the thread's own, as the following
  std::vector<std::shared_ptr<Engine>> active_;
  std::vector<std::shared_ptr<Engine>> waiting_;  // of these, the ones that prepared to wait in this round
};

// The thread for one more communicator, whose first NIC is `interface` (empty: none). Communicators take turns over the
// HOLMES_IO_THREADS threads that run on the same processors (HOLMES_IO_CPUS); threads are started when first needed and
// never end. Thread-safe. Throws UsageError where this process may not use a processor that HOLMES_IO_CPUS names.
IoThread& io_thread_for(const Env& env, const std::string& interface);

}  // namespace holmes
