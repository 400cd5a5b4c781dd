// How the engine waits: spin while bytes come soon, sleep while they do not, look after the channels meanwhile.
#include <sched.h>

#include <algorithm>
#include <ctime>

#include "holmes/core/error.hpp"
#include "holmes/engine/engine.hpp"
#include "holmes/engine/io_thread.hpp"

namespace holmes {
namespace {

// Rounds without blocking after which deadlines are looked at.
constexpr unsigned rounds_per_deadline_check = 512;
// After this many waits that outlived the spin, spin only in one wait of `spin_retry`.
constexpr unsigned spin_miss_limit = 4;
constexpr unsigned spin_retry = 16;
constexpr unsigned bulk_spin_retry = 64;  // of waits for much

// What this thread has used of a processor. Waiting is bounded in it: where ranks share processors, a thread that
// yields lets the others run and burns little; where it has a processor to itself, it burns what it waits.
Duration thread_cpu_time() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

}  // namespace

void Engine::drive_until(const Work& work, std::optional<Clock::time_point> until) {
  std::optional<Clock::time_point> spin_start;
  std::optional<Duration> spin_end;  // in processor time
  unsigned rounds = 0;
  unsigned waits = 0;
  bool is_slow = false;  // the network of this work: its last pieces are waited for asleep too
  while (true) {
    const bool moved = progress();
    if (work.is_final()) {
      if (spin_start) spin_misses_ = 0;
      return;
    }
    if (++rounds % rounds_per_deadline_check == 0) check_deadlines();
    if (moved) {
      if (spin_start) spin_misses_ = 0;
      spin_start.reset();
      spin_end.reset();
      continue;
    }
    if (waits_for_bulk()) {
      is_slow |= wait_for_bulk(until);
      if (until && Clock::now() >= *until) return;
      continue;
    }
    if (!is_slow && (spin_misses_ < spin_miss_limit || waits % spin_retry == 0) &&
        goes_on_spinning(spin_start, spin_end)) {
      ::sched_yield();
      continue;
    }
    ++waits;
    fds_.clear();
    const bool block = prepare_wait(fds_);
    const auto before = Clock::now();
    if (block) sleep(until);
    finish_wait();
    const auto now = Clock::now();
    if (block) spin_misses_ = now - before > spin_ ? spin_misses_ + 1 : 0;
    spin_start.reset();
    spin_end.reset();
    if (until && now >= *until) return;
  }
}

// Until one of `fds_` is ready, something is due, or `until`.
void Engine::sleep(std::optional<Clock::time_point> until) {
  auto wake_at = next_wake();
  if (until && (!wake_at || *until < *wake_at)) wake_at = until;
  poll_until(fds_, wake_at);
}

// Whether much is awaited, over sockets only. What comes with shared memory is asked for too quickly to sleep.
bool Engine::waits_for_bulk() {
  constexpr std::size_t bulk_bytes = 64 * 1024;
  if (group_->any_shared_memory) return false;
  std::size_t total = 0;
  Collective* running = queue_.empty() ? nullptr : queue_.front().get();
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    if (running) total += running->awaited_recv_bytes(peer) + running->awaited_send_bytes(peer);
    total += p2p_.awaited_recv_bytes(peer) + p2p_.awaited_send_bytes(peer);
  }
  return total >= bulk_bytes;
}

// Waits until a whole piece is there. Where that took less than the spin lately (a fast network, or peers that run on
// this processor meanwhile), it asks again and again; on a slow network it sleeps, and what comes while it sleeps costs
// no processor time. Returns whether it slept for longer than the spin.
bool Engine::wait_for_bulk(std::optional<Clock::time_point> until) {
  bool is_long = false;
  fds_.clear();
  if (prepare_wait(fds_)) {
    const auto start = Clock::now();
    bool is_ready = false;
    if (bulk_misses_ < spin_miss_limit || ++bulk_waits_ % bulk_spin_retry == 0) {
      std::optional<Clock::time_point> spin_start;
      std::optional<Duration> spin_end;
      while (!is_ready && goes_on_spinning(spin_start, spin_end)) {
        ::sched_yield();
        is_ready = ::poll(fds_.data(), fds_.size(), 0) != 0;
      }
    }
    if (!is_ready) sleep(until);
    is_long = !is_ready && Clock::now() - start > spin_;
    if (is_long)
      bulk_misses_ = std::min(bulk_misses_ + 1, 2 * spin_miss_limit);
    else if (bulk_misses_ > 0)
      --bulk_misses_;
  }
  finish_wait();
  return is_long;
}

// The first `spin_` of a wait is measured on the wall clock, which costs no system call; then as much processor time.
bool Engine::goes_on_spinning(std::optional<Clock::time_point>& start, std::optional<Duration>& end) const {
  const auto now = Clock::now();
  if (!start) start = now;
  if (now - *start < spin_) return true;
  if (spin_ == Duration::zero()) return false;
  const Duration used = thread_cpu_time();
  if (!end) end = used + spin_;
  return used < *end;
}

bool Engine::prepare_wait(std::vector<pollfd>& fds) {
  if (inbox_filled_.load() || failure_requested_.load() || close_requested_.load() || state_requested_.load())
    return false;
  // It may have died since the waiter looked at its work, and then nothing would wake it any more.
  if (is_dead()) return false;
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
      const auto wait_for = [&](Channel& channel, std::size_t recv_bytes, std::size_t send_bytes) {
        if (recv_bytes > 0) channel.set_low_water(recv_bytes);
        if (recv_bytes || send_bytes) block &= channel.prepare_wait(recv_bytes > 0, send_bytes > 0, fds);
      };
      if (running)
        wait_for(*group_->channels[peer], running->awaited_recv_bytes(peer), running->awaited_send_bytes(peer));
      wait_for(*p2p_.channels()[peer], p2p_.awaited_recv_bytes(peer), p2p_.awaited_send_bytes(peer));
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
  io_thread_.watch(shared_from_this());
}

}  // namespace holmes
