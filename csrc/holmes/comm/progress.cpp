#include "holmes/comm/progress.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "holmes/comm/engine.hpp"
#include "holmes/core/cpu_list.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

namespace holmes {

void poll_until(std::vector<pollfd>& fds, std::optional<Clock::time_point> until) {
  if (!until) {
    ::poll(fds.data(), fds.size(), -1);
    return;
  }
  const auto left = std::max(*until - Clock::now(), Clock::duration::zero());
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec timeout{static_cast<time_t>(seconds.count()),
                         static_cast<long>(std::chrono::nanoseconds(left - seconds).count())};
  ::ppoll(fds.data(), fds.size(), &timeout, nullptr);
}

IoThread::IoThread(int number, const std::vector<int>& cpus) : wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_fd_)
    throw SystemError("cannot make an event descriptor: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  std::thread thread([this] { run(); });
  ::pthread_setname_np(thread.native_handle(), ("holmes-io-" + std::to_string(number)).c_str());
  if (!cpus.empty()) {
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
    // A processor that went offline since it was checked: the thread runs wherever it may.
    if (const int error = ::pthread_setaffinity_np(thread.native_handle(), sizeof wanted, &wanted))
      log(LogLevel::warn, std::nullopt,
          "I/O thread " + std::to_string(number) + " cannot run on processors " + cpu_list_text(cpus) + ": " +
              errno_text(error));
  }
  thread.detach();
}

void IoThread::add(std::shared_ptr<Engine> engine) {
  {
    std::lock_guard lock(mutex_);
    added_.push_back(std::move(engine));
  }
  wake();
}

void IoThread::watch(std::shared_ptr<Engine> engine) {
  {
    std::lock_guard lock(mutex_);
    watched_.push_back(std::move(engine));
  }
  wake();
}

void IoThread::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(wake_fd_.get(), &one, sizeof one);
}

void IoThread::tend(std::optional<Clock::time_point>& wake_at) {
  // Whoever drives an engine looks after it.
  constexpr auto busy_pause = std::chrono::milliseconds(100);
  const auto now = Clock::now();
  for (auto& [engine, at] : tended_) {
    if (now >= at) {
      std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
      const auto next = drive ? engine->take_care() : now + busy_pause;
      if (drive) drive.unlock();
      if (!next) {
        engine.reset();
        continue;
      }
      at = *next;
    }
    if (!wake_at || at < *wake_at) wake_at = at;
  }
  std::erase_if(tended_, [](const Tended& tended) { return tended.engine == nullptr; });
}

void IoThread::run() {
  std::vector<pollfd> fds;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      for (auto& engine : added_)
        if (std::find(active_.begin(), active_.end(), engine) == active_.end()) active_.push_back(std::move(engine));
      added_.clear();
      for (auto& engine : watched_) tended_.push_back({std::move(engine)});
      watched_.clear();
    }
    fds.clear();
    std::optional<Clock::time_point> wake_at;
    waiting_.clear();
    tend(wake_at);
    if (round(fds, wake_at)) {
      fds.push_back({wake_fd_.get(), POLLIN, 0});
      poll_until(fds, wake_at);
      std::uint64_t ignored;
      [[maybe_unused]] const ssize_t bytes = ::read(wake_fd_.get(), &ignored, sizeof ignored);
    }
    for (const auto& engine : waiting_) {
      std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
      if (drive) engine->finish_wait();
    }
  }
}

// Moves every active engine once. Returns whether to block on `fds` until `wake_at`.
bool IoThread::round(std::vector<pollfd>& fds, std::optional<Clock::time_point>& wake_at) {
  bool block = true;
  for (auto& engine : active_) {
    std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
    // Driven by the thread that waits for it, which gives it back here when it leaves work behind. It may be asleep,
    // and has to look at what another thread submitted.
    if (!drive) {
      engine->wake();
      engine.reset();
      continue;
    }
    if (engine->progress()) {
      block = false;
    } else if (engine->has_pending()) {
      block &= engine->prepare_wait(fds);
      waiting_.push_back(engine);
      const auto next = engine->next_wake();
      if (next && (!wake_at || *next < *wake_at)) wake_at = next;
    }
    const bool pending = engine->has_pending();
    if (!pending) engine->watch();
    drive.unlock();
    if (!pending) engine.reset();
  }
  std::erase(active_, nullptr);
  return block;
}

}  // namespace holmes
