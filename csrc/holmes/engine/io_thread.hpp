// IoThread: moves the bytes of asynchronous operations. Shared by many communicators, asleep when idle. How many there
// are in this process, on which processors, and which communicator gets which.
#pragma once

#include <poll.h>

#include <atomic>
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

// poll() until something is ready or `until` (absent: no limit). False where a signal ended it. `now`: where the caller
// has looked at the clock.
bool poll_until(std::vector<pollfd>& fds, std::optional<Clock::time_point> until,
                std::optional<Clock::time_point> now = std::nullopt);

// Thread-safe. Never destroyed. An engine takes its place once; what it is given to the thread for afterwards takes no
// memory.
class IoThread {
public:
  // An engine's room in all lists of the thread, as long as it lives.
  class Place {
  public:
    explicit Place(IoThread& thread) : thread_(thread) { thread_.make_room(); }
    ~Place() { thread_.engines_.fetch_sub(1); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

  private:
    IoThread& thread_;
  };

  // Thread "holmes-io-`number`", on these processors; empty: the kernel decides. Throws SystemError.
  IoThread(int number, const std::vector<int>& cpus);
  IoThread(const IoThread&) = delete;
  IoThread& operator=(const IoThread&) = delete;
  // Drives `engine`, which has its place here, until it has nothing pending.
  void add(std::shared_ptr<Engine> engine);
  // As add, but after `patience`, and then calls Driver::offer_expired: who started an operation often waits for it at
  // once, and drives it better than a thread that has to be woken first.
  void offer(std::shared_ptr<Engine> engine, Duration patience);
  // The caller drives `engine` itself.
  void take_back(const Engine& engine);
  // Looks after `engine` (see Engine::maintain) until it needs it no more.
  void watch(std::shared_ptr<Engine> engine);

private:
  void make_room();
  void run();
  bool round(std::optional<Clock::time_point>& wake_at);
  void maintain(std::optional<Clock::time_point>& wake_at);
  void wake() const;
  // With the lock.
  void add_once(std::shared_ptr<Engine> engine);
  void take_offers();
  void take_new();
  void set_timer(Clock::time_point at);

  struct Offer {
    std::shared_ptr<Engine> engine;
    Clock::time_point due;
  };
  struct Maintained {
    std::shared_ptr<Engine> engine;
    Clock::time_point at{};
  };
  // What the thread alone looks at.
  struct Lists {
    std::vector<Maintained> maintained;
    std::vector<std::shared_ptr<Engine>> active;
    std::vector<std::shared_ptr<Engine>> waiting;  // of these, the ones that prepared to wait in this round

    void reserve(std::size_t engines);
    // Takes over what `old` holds; takes no memory where there is room.
    void take(Lists& old);
  };

  UniqueFd wake_fd_;
  UniqueFd timer_fd_;
  std::atomic<std::size_t> engines_{0};  // that have a place; each is in each of the lists once at most
  std::mutex mutex_;
  std::vector<std::shared_ptr<Engine>> added_;
  std::vector<Offer> offers_;
  Clock::time_point timer_at_ = Clock::time_point::max();  // not later than any offer; max: not armed
  std::vector<std::shared_ptr<Engine>> watched_;           // since the last round
  std::size_t room_ = 0;                                   // of all lists, the thread's own or the following
  std::optional<Lists> larger_;  // for the thread to go on with, where its own have become too small
  Lists own_;                    // the thread's, as the following
  std::vector<pollfd> fds_;
};

// The thread for one more communicator, whose first NIC is `interface` (empty: none). Communicators take turns over the
// HOLMES_IO_THREADS threads that run on the same processors (HOLMES_IO_CPUS); threads are started when first needed and
// never end. Thread-safe. Throws UsageError where this process may not use a processor that HOLMES_IO_CPUS names.
IoThread& io_thread_for(const Env& env, const std::string& interface);

}  // namespace holmes
