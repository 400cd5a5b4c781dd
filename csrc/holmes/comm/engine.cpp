#include "holmes/comm/engine.hpp"

#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "holmes/comm/progress.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

namespace holmes {
namespace {

// How long to look for the reason after a stream ended: the abort frame of the peer may come a little later.
constexpr auto reason_grace = std::chrono::milliseconds(300);
// Rounds without blocking after which deadlines are looked at.
constexpr unsigned rounds_per_deadline_check = 512;
// After this many waits that outlived the spin, spin only in one wait of `spin_retry`.
constexpr unsigned spin_miss_limit = 4;
constexpr unsigned spin_retry = 16;

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
  if (!wake_fd_)
    throw SystemError("cannot make an event descriptor: " + errno_text(errno) + "; raise the limit (ulimit -n)",
                      {.rank = group_->rank, .peer = {}, .host = {}, .nic = {}, .system_errno = errno});
}

Engine::~Engine() = default;

void Engine::throw_if_dead() const {
  if (!is_dead()) return;
  std::lock_guard lock(mutex_);
  throw_error(failure_.kind, "communicator '" + group_->name + "' is dead, make a new one. It failed with: " + failure_.message,
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
         driver_pending_.load(std::memory_order_acquire) > 0;
}

void Engine::help(const Work& work, std::optional<Clock::time_point> until) {
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) drive_until(work, until);
  }
  // Whatever is left (also where another thread drives and is about to stop) goes on in the background.
  if (has_pending()) run_in_background();
}

void Engine::drive_until(const Work& work, std::optional<Clock::time_point> until) {
  std::optional<Clock::time_point> spin_end;
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
      const auto now = Clock::now();
      if (!spin_end) spin_end = now + spin_;
      if (now < *spin_end) {
        ::sched_yield();
        continue;
      }
    }
    ++waits;
    fds_.clear();
    const bool block = prepare_wait(fds_);
    const auto before = Clock::now();
    if (block) {
      auto wake_at = next_deadline();
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
  if (has_pending() && (inbox_filled_.load() || failure_requested_.load())) return false;
  if (is_dead()) return true;
  Collective* running = queue_.empty() ? nullptr : queue_.front().get();
  bool block = true;
  try {
    for (int peer = 0; peer < group_->size; ++peer) {
      if (peer == group_->rank) continue;
      if (!lost_[peer]) {
        fds.push_back({group_->controls[peer]->fd(), POLLIN, 0});
      } else if (involves(peer)) {
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
  try {
    check_controls();
    // A peer that is gone may have left all that is needed; look before giving up on it.
    for (int peer = 0; peer < group_->size; ++peer) {
      if (!lost_[peer] || !involves(peer)) continue;
      while (progress()) {
      }
      if (!is_dead() && involves(peer)) throw_peer_lost(peer, 0);
    }
  } catch (const HolmesError& error) {
    fail(failure_of(error));
  }
  check_deadlines();
}

bool Engine::involves(int peer) const {
  return (!queue_.empty() && front_started_ && queue_.front()->involves(peer)) ||
         p2p_.needs(peer, group_->controls[peer]->said_bye());
}

void Engine::check_controls() {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank || lost_[peer]) continue;
    ControlLink& control = *group_->controls[peer];
    if (const auto failure = control.drain())
      throw_error(failure->kind, failure->message + " [reported by " + control.describe() + "]", failure->context);
    if (control.is_closed()) lost_[peer] = 1;
  }
}

void Engine::throw_stream_closed(const StreamClosed& closed) {
  // The stream ended, but why? Somebody may be telling already.
  const auto end = Clock::now() + reason_grace;
  while (true) {
    check_controls();
    if (lost_[closed.peer] || Clock::now() >= end) break;
    std::vector<pollfd> fds;
    for (int peer = 0; peer < group_->size; ++peer)
      if (peer != group_->rank && !lost_[peer]) fds.push_back({group_->controls[peer]->fd(), POLLIN, 0});
    poll_until(fds, end);
  }
  throw_peer_lost(closed.peer, closed.system_errno);
}

void Engine::throw_peer_lost(int peer, int system_errno) {
  const ControlLink& control = *group_->controls[peer];
  const std::string how = control.said_bye()  ? "destroyed its communicator"
                          : system_errno != 0 ? "is lost: " + errno_text(system_errno)
                                              : "is lost: it closed its connections (its process ended?)";
  ErrorContext context{.rank = group_->rank, .peer = peer, .host = control.host(), .nic = control.nic(), .system_errno = {}};
  if (system_errno != 0) context.system_errno = system_errno;
  throw PeerLostError(control.describe() + " " + how + " during " + describe_running() + ", seen by " + own_place_,
                      context);
}

std::string Engine::describe_running() const {
  return queue_.empty() ? "point-to-point operations of communicator '" + group_->name + "'"
                        : queue_.front()->describe();
}

std::optional<Clock::time_point> Engine::next_deadline() const {
  std::optional<Clock::time_point> next = p2p_.next_deadline();
  for (const auto& collective : queue_)
    if (!next || collective->deadline() < *next) next = collective->deadline();
  return next;
}

void Engine::check_deadlines() {
  const auto now = Clock::now();
  if (is_dead()) return;
  const bool late = std::any_of(queue_.begin(), queue_.end(), [&](const auto& op) { return op->deadline() <= now; });
  const std::string overdue = p2p_.describe_overdue(now);
  if (!late && overdue.empty()) return;
  std::string text = own_place_ + ": the deadline passed in ";
  if (late) {
    text += queue_.front()->describe() + ", waiting for " + queue_.front()->describe_wait();
  } else {
    text += "communicator '" + group_->name + "': " + overdue;
  }
  ErrorContext context{.rank = group_->rank, .peer = {}, .host = {}, .nic = {}, .system_errno = {}};
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank || !involves(peer)) continue;
    context.peer = peer;
    context.host = group_->controls[peer]->host();
    context.nic = group_->controls[peer]->nic();
    break;
  }
  fail({ErrorKind::timeout, text + "; raise the timeout if this is expected", context});
}

void Engine::fail(const Failure& failure, std::shared_ptr<Work> also) {
  std::deque<Submission> unstarted;
  {
    std::lock_guard lock(mutex_);
    if (is_dead()) return;
    failure_ = failure;
    unstarted.swap(inbox_);
    inbox_filled_.store(false);
    dead_.store(true, std::memory_order_release);
  }
  log(LogLevel::info, group_->rank, "communicator '" + group_->name + "' failed: " + failure.message);
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->controls[peer]->send_abort(failure);
    group_->channels[peer]->shutdown();
    p2p_.channels()[peer]->shutdown();
  }
  std::exception_ptr error;
  try {
    throw_error(failure.kind, failure.message, failure.context);
  } catch (...) {
    error = std::current_exception();
  }
  std::vector<std::shared_ptr<Work>> works = p2p_.take_pending();
  std::deque<std::unique_ptr<Collective>> collectives;
  collectives.swap(queue_);
  for (Submission& submission : unstarted) {
    if (auto* collective = std::get_if<std::unique_ptr<Collective>>(&submission)) {
      collectives.push_back(std::move(*collective));
    } else {
      works.push_back(std::get<P2pEngine::Request>(submission).work);
    }
  }
  driver_pending_.store(0);
  if (also) also->fail(error);
  for (const auto& collective : collectives) collective->work().fail(error);
  for (const auto& work : works) work->fail(error);
}

void Engine::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(wake_fd_.get(), &one, sizeof one);
}

void Engine::abort(const std::string& reason) {
  if (is_dead()) return;
  {
    std::lock_guard lock(mutex_);
    requested_failure_ = Failure{
        ErrorKind::aborted,
        "communicator '" + group_->name + "' was aborted by " + own_place_ + ": " + reason,
        {.rank = group_->rank, .peer = {}, .host = {}, .nic = {}, .system_errno = {}}};
    failure_requested_.store(true, std::memory_order_release);
  }
  wake();
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) progress();
  }
  if (has_pending()) run_in_background();
}

void Engine::close() {
  wake();
  std::lock_guard drive(drive_);
  if (is_dead()) return;
  if (has_pending()) {
    take_inbox();
    fail({ErrorKind::aborted, "communicator '" + group_->name + "' was destroyed by " + own_place_ + " with operations pending",
          {.rank = group_->rank, .peer = {}, .host = {}, .nic = {}, .system_errno = {}}});
    return;
  }
  {
    std::lock_guard lock(mutex_);
    failure_ = {ErrorKind::usage, "it was destroyed", {}};
    dead_.store(true, std::memory_order_release);
  }
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->controls[peer]->send_bye();
    // Unread bytes would turn the orderly end into a reset.
    [[maybe_unused]] const auto ignored = group_->controls[peer]->drain();
    group_->channels[peer]->shutdown();
    p2p_.channels()[peer]->shutdown();
  }
}

std::vector<ConnectionInfo> Engine::connections() const {
  std::vector<ConnectionInfo> infos;
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    infos.push_back(group_->controls[peer]->info());
    group_->channels[peer]->append_info(infos);
    p2p_.channels()[peer]->append_info(infos);
  }
  return infos;
}

}  // namespace holmes
