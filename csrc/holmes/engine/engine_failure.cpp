// The engine's failures: whom it waits for, who is gone, and how everybody learns of it.
#include <algorithm>

#include "holmes/core/failure.hpp"
#include "holmes/core/log.hpp"
#include "holmes/engine/engine.hpp"
#include "holmes/engine/io_thread.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

// How long to look for the reason after a stream ended: the abort frame of the peer may come a little later.
constexpr auto reason_grace = std::chrono::milliseconds(300);

}  // namespace

bool Engine::involves(int peer) const {
  return (!queue_.empty() && front_started_ && queue_.front()->involves(peer)) ||
         p2p_.needs(peer, group_->controls[peer]->said_bye());
}

// Gone for good, with something pending that cannot end without it. A stream that tells its own end is believed rather
// than the control connection, which may be faster than the last bytes.
bool Engine::is_missed(int peer) const {
  if (!lost_[peer]) return false;
  return (!group_->channels[peer]->tells_end() || p2p_.has_ended(peer)) && involves(peer);
}

void Engine::check_controls() {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank || lost_[peer]) continue;
    ControlLink& control = *group_->controls[peer];
    if (const auto failure = control.drain())
      throw_error(failure->kind, failure->message + " [reported by " + control.describe() + "]", failure->context);
    if (control.is_closed()) lost_[peer] = 1;
    if (control.take_roll_call()) {
      const auto unanswered = unanswered_peer();
      const std::string nic = unanswered ? group_->controls[*unanswered]->nic() : "";
      std::lock_guard lock(mutex_);
      control.send_present({next_sequence_, unanswered, nic});
    }
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
      if (peer != group_->rank && !lost_[peer]) group_->controls[peer]->append_fds(fds);
    poll_until(fds, end);
  }
  throw_peer_lost(closed.peer, closed.system_errno);
}

void Engine::throw_peer_lost(int peer, int system_errno) {
  const ControlLink& control = *group_->controls[peer];
  const std::string how = control.said_bye()  ? farewell
                          : system_errno != 0 ? "is lost: " + errno_text(system_errno)
                                              : "is lost: it closed its connections (its process ended?)";
  ErrorContext context = context_of(peer);
  if (system_errno != 0) context.system_errno = system_errno;
  throw PeerLostError(control.describe() + " " + how + " during " + describe_running() + ", seen by " + own_place_,
                      context);
}

ErrorContext Engine::context_of(int peer) const {
  const ControlLink& control = *group_->controls[peer];
  return {.rank = group_->label(group_->rank),
          .peer = group_->label(peer),
          .host = control.host(),
          .nic = control.nic(),
          .system_errno = {}};
}

std::string Engine::describe_running() const {
  return queue_.empty() ? "point-to-point operations of communicator '" + group_->name + "'"
                        : queue_.front()->describe();
}

void Engine::fail(const Failure& failure, std::shared_ptr<Work> also) {
  std::deque<Submission> unstarted;
  if (!is_dead()) take_state();  // what it waited for, while that can be told
  {
    std::lock_guard lock(mutex_);
    if (is_dead()) return;
    failure_ = failure;
    has_failed_ = true;
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
  if (!is_internal(group_->name)) {
    count_failure(group_->name, failure.kind);
    // Before anybody hears of the error: the process may end then.
    dump_on_failure(failure.message);
  }
  const std::exception_ptr error = error_of(failure);
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Work>> works = p2p_.take_pending();
  std::deque<std::unique_ptr<Collective>> collectives;
  collectives.swap(queue_);
  for (Submission& submission : unstarted) {
    if (auto* collective = std::get_if<std::unique_ptr<Collective>>(&submission)) {
      collectives.push_back(std::move(*collective));
    } else {
      auto& request = std::get<P2pEngine::Request>(submission);
      group_->recorder->finish(request.record, false, now);
      works.push_back(request.work);
    }
  }
  driver_pending_.store(0);
  if (also) also->fail(error);
  for (const auto& collective : collectives) {
    group_->recorder->finish(collective->record(), false, now);
    collective->work().fail(error, now);
  }
  for (const auto& work : works) work->fail(error, now);
}

void Engine::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(wake_fd_.get(), &one, sizeof one);
}

Failure Engine::abort_failure(const std::string& reason) const {
  return {ErrorKind::aborted,
          "communicator '" + group_->name + "' was aborted by " + own_place_ + ": " + reason,
          {.rank = group_->label(group_->rank), .peer = {}, .host = {}, .nic = {}, .system_errno = {}}};
}

void Engine::request_failure(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    if (!requested_failure_) requested_failure_ = failure;
    failure_requested_.store(true, std::memory_order_release);
  }
  wake();
}

void Engine::fail_as_requested() {
  std::optional<Failure> failure;
  {
    std::lock_guard lock(mutex_);
    failure.swap(requested_failure_);
    failure_requested_.store(false);
  }
  if (failure) fail(*failure);
}

void Engine::abort(const std::string& reason) {
  if (is_dead() || is_inherited()) return;
  request_failure(abort_failure(reason));
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) progress();
  }
  if (has_pending()) give_to_io_thread();
}

void Engine::fail_in_background(const Failure& failure) {
  if (is_dead() || is_inherited()) return;
  request_failure(failure);
  give_to_io_thread();
}

void Engine::close() {
  if (is_inherited()) return;
  close_requested_.store(true, std::memory_order_release);
  wake();
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) close_now();
  }
  if (has_pending()) give_to_io_thread();
}

// Of peers that left in order and whose stream, where it tells its end, is read to it: all else goes on.
void Engine::end_watches() {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank || !lost_[peer]) continue;
    const ControlLink& control = *group_->controls[peer];
    if (!control.said_bye() || (p2p_.channels()[peer]->tells_end() && !p2p_.has_ended(peer))) continue;
    const auto works = p2p_.take_watches(peer);
    driver_pending_.fetch_sub(static_cast<int>(works.size()));
    for (const auto& work : works)
      work->fail(
          error_of({ErrorKind::aborted, "communicator '" + group_->name + "': " + control.describe() + " " + farewell,
                    context_of(peer)}),
          Clock::now());
  }
}

// Why operations are pending when the communicator is destroyed. Where that is because a peer is gone (seen so far on
// another communicator only), that is what the others are told, not what it led to here.
Failure Engine::reason_of_pending() {
  try {
    check_controls();
    for (int peer = 0; peer < group_->size; ++peer)
      if (peer != group_->rank && lost_[peer] && !group_->controls[peer]->said_bye()) throw_peer_lost(peer, 0);
  } catch (const HolmesError& error) {
    return failure_of(error);
  }
  return {ErrorKind::aborted,
          "communicator '" + group_->name + "' was destroyed by " + own_place_ + " with operations pending",
          {.rank = group_->label(group_->rank), .peer = {}, .host = {}, .nic = {}, .system_errno = {}}};
}

void Engine::close_now() {
  close_requested_.store(false, std::memory_order_release);
  if (failure_requested_.load(std::memory_order_acquire)) fail_as_requested();
  if (!is_dead() && inbox_filled_.load(std::memory_order_acquire)) take_inbox();
  if (is_dead()) return;
  const auto watches = p2p_.take_watches(std::nullopt);
  driver_pending_.fetch_sub(static_cast<int>(watches.size()));
  for (const auto& work : watches)
    work->fail(error_of({ErrorKind::aborted, "communicator '" + group_->name + "' was destroyed here", {}}),
               Clock::now());
  if (has_pending()) {
    fail(reason_of_pending());
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

}  // namespace holmes
