#include "holmes/engine/io_thread.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <map>

#include "holmes/core/cpu_list.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/thread.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/engine/engine.hpp"

namespace holmes {
namespace {

timespec timespec_of(Duration duration) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(duration);
  return {static_cast<time_t>(seconds.count()),
          static_cast<long>(std::chrono::nanoseconds(duration - seconds).count())};
}

// What an eventfd or a timer counts.
void clear(const UniqueFd& fd) {
  std::uint64_t ignored;
  [[maybe_unused]] const ssize_t bytes = ::read(fd.get(), &ignored, sizeof ignored);
}

}  // namespace

bool poll_until(std::vector<pollfd>& fds, std::optional<Clock::time_point> until,
                std::optional<Clock::time_point> now) {
  timespec timeout{};
  if (until) timeout = timespec_of(std::max(*until - (now ? *now : Clock::now()), Clock::duration::zero()));
  return ::ppoll(fds.data(), fds.size(), until ? &timeout : nullptr, nullptr) >= 0 || errno != EINTR;
}

IoThread::IoThread(int number, const std::vector<int>& cpus)
    : wake_fd_(event_fd()), timer_fd_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!timer_fd_)
    throw SystemError("cannot make a timer descriptor: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  const std::string name = "holmes-io-" + std::to_string(number);
  fds_.reserve(2);  // its own descriptors
  std::thread thread = start_thread("moves the bytes of asynchronous operations", [this] { run(); });
  ::pthread_setname_np(thread.native_handle(), name.c_str());
  if (!cpus.empty()) {
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
    // A processor that went offline since it was checked: the thread runs wherever it may.
    if (const int error = ::pthread_setaffinity_np(thread.native_handle(), sizeof wanted, &wanted))
      where_memory_allows([&] {
        log(LogLevel::warn, std::nullopt,
            "I/O thread " + std::to_string(number) + " cannot run on processors " + cpu_list_text(cpus) + ": " +
                errno_text(error));
      });
  }
  thread.detach();
}

void IoThread::Lists::reserve(std::size_t engines) {
  maintained.reserve(engines);
  active.reserve(engines);
  waiting.reserve(engines);
}

void IoThread::Lists::take(Lists& old) {
  std::ranges::move(old.maintained, std::back_inserter(maintained));
  std::ranges::move(old.active, std::back_inserter(active));
  std::ranges::move(old.waiting, std::back_inserter(waiting));
}

// The thread's own lists may be in use: it changes to larger ones when it next looks.
void IoThread::make_room() {
  std::lock_guard lock(mutex_);
  const std::size_t needed = engines_.load() + 1;
  if (needed > room_) {
    const std::size_t room = std::max<std::size_t>(2 * room_, 8);
    Lists larger;
    larger.reserve(room);
    added_.reserve(room);
    offers_.reserve(room);
    watched_.reserve(room);
    larger_ = std::move(larger);
    room_ = room;
  }
  engines_.fetch_add(1);
}

void IoThread::add_once(std::shared_ptr<Engine> engine) {
  if (std::ranges::find(added_, engine) == added_.end()) added_.push_back(std::move(engine));
}

void IoThread::add(std::shared_ptr<Engine> engine) {
  {
    std::lock_guard lock(mutex_);
    add_once(std::move(engine));
  }
  wake();
}

void IoThread::offer(std::shared_ptr<Engine> engine, Duration patience) {
  const auto due = Clock::now() + patience;
  std::lock_guard lock(mutex_);
  const auto earlier = std::ranges::find(offers_, engine, &Offer::engine);
  if (earlier == offers_.end())
    offers_.push_back({std::move(engine), due});
  else
    earlier->due = std::min(earlier->due, due);
  if (due < timer_at_) set_timer(due);
}

void IoThread::take_back(const Engine& engine) {
  // A timer that is due soon is cheaper to stop than to wake up for.
  constexpr std::chrono::microseconds soon{100};
  std::lock_guard lock(mutex_);
  const auto taken = std::erase_if(offers_, [&](const Offer& offer) { return offer.engine.get() == &engine; });
  if (taken > 0 && offers_.empty() && timer_at_ - Clock::now() < soon) set_timer(Clock::time_point::max());
}

// The timer is spent where it has rung: one is set for the offers that are not due yet.
void IoThread::take_offers() {
  const auto now = Clock::now();
  auto next = Clock::time_point::max();
  std::erase_if(offers_, [&](Offer& offer) {
    if (now < offer.due) {
      next = std::min(next, offer.due);
      return false;
    }
    offer.engine->driver().offer_expired();
    add_once(std::move(offer.engine));
    return true;
  });
  set_timer(next);
}

void IoThread::take_new() {
  if (larger_) {
    larger_->take(own_);
    own_ = std::move(*larger_);
    larger_.reset();
  }
  for (auto& engine : added_)
    if (std::ranges::find(own_.active, engine) == own_.active.end()) own_.active.push_back(std::move(engine));
  added_.clear();
  for (auto& engine : watched_) own_.maintained.push_back({std::move(engine)});
  watched_.clear();
}

void IoThread::set_timer(Clock::time_point at) {
  timer_at_ = at;
  itimerspec once{};  // zero: never
  if (at != Clock::time_point::max()) once.it_value = timespec_of(at.time_since_epoch());
  ::timerfd_settime(timer_fd_.get(), TFD_TIMER_ABSTIME, &once, nullptr);
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

void IoThread::maintain(std::optional<Clock::time_point>& wake_at) {
  // Whoever drives an engine looks after it.
  constexpr auto busy_pause = std::chrono::milliseconds(100);
  const auto now = Clock::now();
  for (auto& [engine, at] : own_.maintained) {
    if (now >= at) {
      std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
      const auto next = drive ? engine->maintain() : now + busy_pause;
      if (drive) drive.unlock();
      if (!next) {
        engine.reset();
        continue;
      }
      at = *next;
    }
    if (!wake_at || at < *wake_at) wake_at = at;
  }
  std::erase_if(own_.maintained, [](const Maintained& maintained) { return maintained.engine == nullptr; });
}

void IoThread::run() {
  bool has_rung = false;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (has_rung || Clock::now() >= timer_at_) take_offers();
      has_rung = false;
      take_new();
    }
    fds_.clear();
    fds_.push_back({wake_fd_.get(), POLLIN, 0});
    fds_.push_back({timer_fd_.get(), POLLIN, 0});
    std::optional<Clock::time_point> wake_at;
    own_.waiting.clear();
    maintain(wake_at);
    if (round(wake_at)) {
      poll_until(fds_, wake_at);
      if (fds_[0].revents) clear(wake_fd_);
      has_rung = fds_[1].revents != 0;
      if (has_rung) clear(timer_fd_);
    }
    for (const auto& engine : own_.waiting) {
      std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
      if (drive) engine->finish_wait(Clock::now());
    }
  }
}

// Moves every active engine once. Returns whether to block on `fds_` until `wake_at`.
bool IoThread::round(std::optional<Clock::time_point>& wake_at) {
  bool block = true;
  for (auto& engine : own_.active) {
    std::unique_lock drive(engine->drive_lock(), std::try_to_lock);
    // Driven by the thread that waits for it, which gives it back here when it leaves work behind. It may be asleep,
    // and has to look at what another thread submitted. (Or by one that only looks, and sends nothing.)
    if (!drive) {
      engine->wake();
      engine->have_kept_sent();
      engine.reset();
      continue;
    }
    if (engine->progress()) {
      block = false;
    } else if (engine->has_pending()) {
      block &= engine->prepare_wait(fds_);
      own_.waiting.push_back(engine);
      const auto next = engine->next_wake(Clock::now());
      if (next && (!wake_at || *next < *wake_at)) wake_at = next;
    } else {
      engine->send_kept();
    }
    const bool pending = engine->has_pending();
    if (!pending) engine->watch();
    drive.unlock();
    if (!pending) engine.reset();
  }
  std::erase(own_.active, nullptr);
  return block;
}

namespace {

// Those of `cpus` a thread of this process can run on. A thread of its own asks: the caller's affinity stays as it is.
std::vector<int> usable_cpus(const std::vector<int>& cpus) {
  std::vector<int> usable;
  usable.reserve(cpus.size());  // nothing is thrown in that thread
  start_thread("looks at HOLMES_IO_CPUS", [&] {
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
    if (::pthread_setaffinity_np(::pthread_self(), sizeof wanted, &wanted) != 0) return;
    cpu_set_t given;
    if (::pthread_getaffinity_np(::pthread_self(), sizeof given, &given) != 0) return;
    std::copy_if(cpus.begin(), cpus.end(), std::back_inserter(usable),
                 [&](int cpu) { return CPU_ISSET(static_cast<std::size_t>(cpu), &given); });
  }).join();
  return usable;
}

// The processors next to the NIC. Empty where it belongs to no NUMA node, or this process to another one.
std::vector<int> cpus_near(const std::string& interface) {
  if (interface.empty()) return {};
  const auto nic = find_nic(interface);
  if (!nic || !nic->numa_node) return {};
  const Sysfs sysfs(default_sysfs_root());
  const auto text = sysfs.read("devices/system/node/node" + std::to_string(*nic->numa_node) + "/cpulist");
  const auto cpus = cpu_list_from(text.value_or(""));
  return cpus ? usable_cpus(*cpus) : std::vector<int>{};
}

std::vector<int> chosen_cpus(const Env& env, const std::string& interface) {
  if (env.io_cpus_near_nic) return cpus_near(interface);
  if (env.io_cpus.empty()) return {};
  const std::vector<int> usable = usable_cpus(env.io_cpus);
  if (usable.size() < env.io_cpus.size()) {
    std::vector<int> refused;
    std::ranges::set_difference(env.io_cpus, usable, std::back_inserter(refused));
    throw UsageError(
        "HOLMES_IO_CPUS='" + cpu_list_text(env.io_cpus) + "' is not allowed: this process may not run on " +
        cpu_list_text(refused) +
        "; name processors of this machine that its container may use (nproc, taskset -cp $$) or unset it");
  }
  return usable;
}

struct Pool {
  // Threads on the same processors.
  struct ThreadSet {
    std::vector<IoThread*> threads;
    std::size_t communicators = 0;
  };
  std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::map<std::vector<int>, ThreadSet> thread_sets;
  int threads = 0;
};

Pool& pool() { return own_of_process<Pool>(); }

}  // namespace

IoThread& io_thread_for(const Env& env, const std::string& interface) {
  const std::vector<int> cpus = chosen_cpus(env, interface);
  Pool& own = pool();
  std::lock_guard lock(own.mutex);
  Pool::ThreadSet& set = own.thread_sets[cpus];
  const std::size_t index = set.communicators % static_cast<std::size_t>(env.io_threads);
  if (index >= set.threads.size()) {
    set.threads.reserve(index + 1);  // before there is a thread that nobody knows
    set.threads.push_back(new IoThread(own.threads++, cpus));
  }
  ++set.communicators;
  return *set.threads[index];
}

}  // namespace holmes
