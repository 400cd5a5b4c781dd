#include "holmes/comm/engine.hpp"

#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "holmes/comm/progress.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

namespace holmes {
namespace {

// Rounds without blocking after which deadlines are looked at.
constexpr unsigned rounds_per_deadline_check = 512;
// After this many waits that outlived the spin, spin only in one wait of `spin_retry`.
constexpr unsigned spin_miss_limit = 4;
constexpr unsigned spin_retry = 16;

// What this thread has used of a processor. Waiting is bounded in it: where ranks share processors, a thread that
// yields lets the others run and burns little; where it has a processor to itself, it burns what it waits.
Duration thread_cpu_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

Failure failure_of(const HolmesError& error) { return {error.kind(), error.what(), error.context()}; }

}  // namespace

Engine::Engine(std::unique_ptr<Group> group, std::vector<std::unique_ptr<Channel>> p2p_channels, std::string own_place,
               Duration spin)
    : group_(std::move(group)),
      p2p_(*group_, std::move(p2p_channels)),
      own_place_(std::move(own_place)),
      spin_(spin),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lost_(static_cast<std::size_t>(group_->size)) {
  for (const auto* channels : {&std::as_const(group_->channels), &p2p_.channels()})
    for (const auto& channel : *channels)
      if (channel && channel->needs_care()) tended_.push_back(channel.get());
  if (!wake_fd_)
    throw SystemError("cannot make an event descriptor: " + errno_text(errno) + "; raise the limit (ulimit -n)",
                      {.rank = group_->rank, .peer = {}, .host = {}, .nic = {}, .system_errno = errno});
}

Engine::~Engine() = default;

void Engine::throw_if_dead() const {
  if (!is_dead()) return;
  std::lock_guard lock(mutex_);
  throw_error(failure_.kind,
              "communicator '" + group_->name + "' is dead, make a new one. It failed with: " + failure_.message,
              failure_.context);
}

void Engine::submit(std::unique_ptr<Collective> collective) {
  std::unique_lock lock(mutex_);
  if (!is_dead()) {
    collective->set_sequence(next_sequence_++);
    inbox_.emplace_back(std::move(collective));
    inbox_filled_.store(true, std::memory_order_release);
    return;
  }
  lock.unlock();
  throw_if_dead();
}

void Engine::submit(std::vector<P2pEngine::Request> requests) {
  std::unique_lock lock(mutex_);
  if (!is_dead()) {
    for (auto& request : requests) inbox_.emplace_back(std::move(request));
    inbox_filled_.store(true, std::memory_order_release);
    return;
  }
  lock.unlock();
  throw_if_dead();
}

void Engine::run_in_background() { IoThread::instance().add(shared_from_this()); }

bool Engine::has_pending() const {
  return inbox_filled_.load(std::memory_order_acquire) || failure_requested_.load(std::memory_order_acquire) ||
         close_requested_.load(std::memory_order_acquire) || driver_pending_.load(std::memory_order_acquire) > 0;
}

void Engine::help(const Work& work, std::optional<Clock::time_point> until) {
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) {
      drive_until(work, until);
      if (!has_pending()) watch();
    }
  }
  // Whatever is left (also where another thread drives and is about to stop) goes on in the background.
  if (has_pending()) run_in_background();
}

void Engine::drive_until(const Work& work, std::optional<Clock::time_point> until) {
  std::optional<Duration> spin_end;
  unsigned rounds = 0;
  unsigned waits = 0;
  while (true) {
    const bool moved = progress();
    if (work.is_final()) {
      if (spin_end) spin_misses_ = 0;
      return;
    }
    if (++rounds % rounds_per_deadline_check == 0) check_deadlines();
    if (moved) {
      if (spin_end) spin_misses_ = 0;
      spin_end.reset();
      continue;
    }
    if (spin_misses_ < spin_miss_limit || waits % spin_retry == 0) {
      const auto used = thread_cpu_time();
      if (!spin_end) spin_end = used + spin_;
      if (used < *spin_end) {
        ::sched_yield();
        continue;
      }
    }
    ++waits;
    fds_.clear();
    const bool block = prepare_wait(fds_);
    const auto before = Clock::now();
    if (block) {
      auto wake_at = next_wake();
      if (until && (!wake_at || *until < *wake_at)) wake_at = until;
      poll_until(fds_, wake_at);
    }
    finish_wait();
    const auto now = Clock::now();
    if (block && now - before > spin_) ++spin_misses_;
    spin_end.reset();
    if (until && now >= *until) return;
  }
}

bool Engine::progress() {
  try {
    return progress_or_throw();
  } catch (const StreamClosed& closed) {
    try {
      throw_stream_closed(closed);
    } catch (const HolmesError& error) {
      fail(failure_of(error));
    }
  } catch (const HolmesError& error) {
    fail(failure_of(error));
  } catch (const std::exception& error) {
    fail({ErrorKind::system, "communicator '" + group_->name + "': " + error.what(), {}});
  }
  return true;
}

bool Engine::progress_or_throw() {
  if (failure_requested_.load(std::memory_order_acquire)) {
    std::optional<Failure> failure;
    {
      std::lock_guard lock(mutex_);
      failure.swap(requested_failure_);
      failure_requested_.store(false);
    }
    if (failure) fail(*failure);
    return true;
  }
  if (close_requested_.load(std::memory_order_acquire)) {
    close_now();
    return true;
  }
  if (inbox_filled_.load(std::memory_order_acquire)) take_inbox();
  bool moved = false;
  if (!queue_.empty()) {
    Collective& running = *queue_.front();
    if (!front_started_) {
      front_started_ = true;
      running.work().mark_running();
      running.start();
    }
    moved = running.advance();
    if (running.is_done()) {
      const std::unique_ptr<Collective> finished = std::move(queue_.front());
      queue_.pop_front();
      front_started_ = false;
      driver_pending_.fetch_sub(1);
      finished->work().complete();
      moved = true;
    }
  }
  if (!p2p_.is_idle()) {
    const std::size_t before = p2p_.pending();
    moved |= p2p_.advance();
    driver_pending_.fetch_sub(static_cast<int>(before - p2p_.pending()));
  }
  return moved;
}

void Engine::take_inbox() {
  std::deque<Submission> taken;
  {
    std::lock_guard lock(mutex_);
    taken.swap(inbox_);
    driver_pending_.fetch_add(static_cast<int>(taken.size()));
    inbox_filled_.store(false, std::memory_order_release);
  }
  for (auto it = taken.begin(); it != taken.end(); ++it) {
    if (auto* collective = std::get_if<std::unique_ptr<Collective>>(&*it)) {
      queue_.push_back(std::move(*collective));
      continue;
    }
    auto& request = std::get<P2pEngine::Request>(*it);
    const auto work = request.work;
    try {
      const std::size_t before = p2p_.pending();
      p2p_.submit(std::move(request));
      // A receive may find its message waiting and be finished at once.
      driver_pending_.fetch_sub(static_cast<int>(before + 1 - p2p_.pending()));
    } catch (const HolmesError& error) {
      // What was not taken yet fails with the rest.
      {
        std::lock_guard lock(mutex_);
        std::move(std::next(it), taken.end(), std::front_inserter(inbox_));
      }
      fail(failure_of(error), work);
      return;
    }
  }
}

bool Engine::prepare_wait(std::vector<pollfd>& fds) {
  if (inbox_filled_.load() || failure_requested_.load() || close_requested_.load()) return false;
  if (is_dead()) return true;
  Collective* running = queue_.empty() ? nullptr : queue_.front().get();
  bool block = true;
  try {
    for (int peer = 0; peer < group_->size; ++peer) {
      if (peer == group_->rank) continue;
      if (!lost_[peer]) {
        group_->controls[peer]->append_fds(fds);
      } else if (is_missed(peer)) {
        block = false;  // finish_wait will say so
      }
      if (running) {
        const bool recv = running->awaits_recv(peer);
        const bool send = running->awaits_send(peer);
        if (recv || send) block &= group_->channels[peer]->prepare_wait(recv, send, fds);
      }
      const bool recv = p2p_.awaits_recv(peer);
      const bool send = p2p_.awaits_send(peer);
      if (recv || send) block &= p2p_.channels()[peer]->prepare_wait(recv, send, fds);
    }
  } catch (const HolmesError& error) {
    fail(failure_of(error));
    return false;
  }
  fds.push_back({wake_fd_.get(), POLLIN, 0});
  return block;
}

void Engine::finish_wait() {
  std::uint64_t ignored;
  [[maybe_unused]] const ssize_t bytes = ::read(wake_fd_.get(), &ignored, sizeof ignored);
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->channels[peer]->finish_wait();
    p2p_.channels()[peer]->finish_wait();
  }
  if (is_dead()) return;
  if (!tended_.empty()) {
    const auto now = Clock::now();
    for (Channel* channel : tended_) channel->take_care(now);
  }
  try {
    check_controls();
    // A peer that is gone may have left all that is needed; look before giving up on it.
    for (int peer = 0; peer < group_->size; ++peer) {
      if (!is_missed(peer)) continue;
      while (progress()) {
      }
      if (!is_dead() && is_missed(peer)) throw_peer_lost(peer, 0);
    }
  } catch (const HolmesError& error) {
    fail(failure_of(error));
  }
  check_deadlines();
}

std::optional<Clock::time_point> Engine::next_wake() const {
  auto next = next_deadline();
  for (const Channel* channel : tended_) {
    const auto at = channel->next_care();
    if (at && (!next || *at < *next)) next = at;
  }
  return next;
}

std::optional<Clock::time_point> Engine::take_care() {
  constexpr auto busy_pause = std::chrono::milliseconds(100);
  std::optional<Clock::time_point> next;
  const auto now = Clock::now();
  if (has_pending()) {
    next = now + busy_pause;  // who drives the operation looks after the channels
  } else if (!is_dead()) {
    for (Channel* channel : tended_) channel->take_care(now);
    next = next_wake();
  }
  is_watched_ = next.has_value();
  return next;
}

// What was sent last is not acknowledged yet; should its rail be lost now, somebody has to send it again.
void Engine::watch() {
  if (is_watched_ || tended_.empty() || is_dead() || !next_wake()) return;
  is_watched_ = true;
  IoThread::instance().watch(shared_from_this());
}

std::vector<ConnectionInfo> Engine::connections() const {
  std::vector<ConnectionInfo> infos;
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->controls[peer]->append_info(infos);
    group_->channels[peer]->append_info(infos);
    p2p_.channels()[peer]->append_info(infos);
  }
  return infos;
}

}  // namespace holmes
