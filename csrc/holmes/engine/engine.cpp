#include "holmes/engine/engine.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/engine/settling.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

// Operations started by what follows another one's end (Work::on_final) are not driven inside of it.
thread_local bool this_thread_drives = false;

// What the works of `failure` raise.
std::exception_ptr raised(const Failure& failure) {
  const auto make = [&]() -> std::exception_ptr {
    try {
      failure.raise();
    } catch (const std::bad_alloc&) {
      throw;
    } catch (...) {
      return std::current_exception();
    }
  };
  return made_or(make, [] { return std::make_exception_ptr(std::bad_alloc()); });
}

}  // namespace

Engine::Engine(std::unique_ptr<Group> group, std::vector<std::unique_ptr<Channel>> p2p_channels, std::string own_place,
               Duration spin, IoThread& io_thread, UniqueFd wake_fd, std::vector<int> sockets)
    : group_(std::move(group)),
      wake_fd_(std::move(wake_fd)),
      operations_(*group_, std::move(p2p_channels), wake_fd_.get()),
      detector_(*group_, operations_, std::move(own_place)),
      records_(*this),
      io_thread_(io_thread),
      io_place_(io_thread),
      driver_(*this, spin, io_thread),
      sockets_(std::move(sockets)) {
  for (const auto* channels : {&std::as_const(group_->channels), &operations_.p2p().channels()})
    for (const auto& channel : *channels)
      if (channel && channel->needs_maintenance()) maintained_.push_back(channel.get());
}

Engine::~Engine() {
  where_memory_allows([&] { records_.keep_after_end(); });
}

void Engine::throw_if_inherited() const {
  if (!is_inherited()) return;
  throw UsageError("communicator '" + group_->name +
                   "' belongs to the process that made it; a forked child cannot use it: make one in the child, or use "
                   "it in the parent only");
}

void Engine::throw_if_dead() const {
  if (!is_dead()) return;
  std::lock_guard lock(mutex_);
  throw_dead(group_->name, failure_);
}

std::optional<Failure> Engine::failure() const {
  if (!is_dead() || is_inherited()) return std::nullopt;
  return failure_or(ErrorKind::communicator, [this] {
    std::lock_guard lock(mutex_);
    return failure_;
  });
}

void Engine::submit(std::unique_ptr<Collective> collective) {
  if (!operations_.submit(collective)) throw_if_dead();
}

void Engine::submit(std::vector<P2pEngine::Request> requests) {
  if (!operations_.submit(requests)) throw_if_dead();
}

bool Engine::has_pending() const {
  return !operations_.is_empty() || failure_requested_.load(std::memory_order_acquire) ||
         close_requested_.load(std::memory_order_acquire);
}

bool Engine::is_wanted() const {
  return operations_.has_new() || failure_requested_.load(std::memory_order_acquire) ||
         close_requested_.load(std::memory_order_acquire) || records_.is_requested();
}

void Engine::fail_short(const std::function<std::string()>& describe) {
  fail(failure_or(ErrorKind::system, [&] {
    return Failure{ErrorKind::system, "no memory is left for " + describe() + ", part of which others have",
                   detector_.own_context()};
  }));
}

bool Engine::drives_in_this_thread() { return this_thread_drives; }

bool Engine::progress() {
  // What follows the end of an operation may drive another communicator's: the outer driver still drives afterwards.
  const bool drove = std::exchange(this_thread_drives, true);
  const bool moved = progress_or_fail();
  this_thread_drives = drove;
  return moved;
}

bool Engine::progress_or_fail() {
  try {
    return progress_or_throw();
  } catch (const StreamClosed& closed) {
    fail_where_it_throws([&] { detector_.throw_stream_closed(closed); });
  } catch (const std::exception&) {
    fail(current_failure());
  }
  return true;
}

// Whatever it is, memory that is short among it, ends the communicator in order.
template <typename Action>
void Engine::fail_where_it_throws(const Action& action) {
  try {
    action();
  } catch (const StreamClosed&) {
    fail(current_failure());
  } catch (const std::exception&) {
    fail(current_failure());
  }
}

Failure Engine::current_failure() const {
  return failure_or(ErrorKind::system, [this]() -> Failure {
    try {
      throw;
    } catch (const HolmesError& error) {
      return failure_of(error);
    } catch (const std::exception& error) {
      return {ErrorKind::system, "communicator '" + group_->name + "': " + error.what(), {}};
    } catch (const StreamClosed&) {
      return {ErrorKind::peer_lost, "communicator '" + group_->name + "': a stream was closed",
              detector_.own_context()};
    }
  });
}

bool Engine::progress_or_throw() {
  if (failure_requested_.load(std::memory_order_acquire)) {
    fail_as_requested();
    return true;
  }
  if (close_requested_.load(std::memory_order_acquire)) return settle_and_close();
  if (operations_.has_new()) operations_.take_new();
  if (records_.is_requested()) records_.take_state();
  const bool moved = operations_.advance();
  group_->clock.forget();
  if (operations_.p2p().watches() > 0) end_watches();
  return moved;
}

std::vector<ConnectionInfo> Engine::connections() const {
  std::vector<ConnectionInfo> infos;
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->controls[peer]->append_info(infos);
    group_->channels[peer]->append_info(infos);
    operations_.p2p().channels()[peer]->append_info(infos);
  }
  return infos;
}

bool Engine::prepare_wait(std::vector<pollfd>& fds) {
  if (operations_.has_new() || failure_requested_.load() || records_.is_requested()) return false;
  if (close_requested_.load() && !operations_.is_settling()) return false;
  // It may have died since the waiter looked at its work, and then nothing would wake it any more.
  if (is_dead()) return false;
  const P2pEngine& p2p = operations_.p2p();
  bool block = true;
  fail_where_it_throws([&] {
    operations_.send_kept();
    if (detector_.has_lost_any())  // finish_wait will say who is missed
      for (int peer = 0; peer < group_->size; ++peer) block &= !detector_.is_missed(peer);
    const auto wait_for = [&](Channel& channel, std::size_t recv_bytes, std::size_t send_bytes) {
      if (recv_bytes > 0) channel.set_low_water(recv_bytes);
      if (!recv_bytes && !send_bytes) return;
      waited_.push_back(&channel);
      block &= channel.prepare_wait(recv_bytes > 0, send_bytes > 0, fds);
    };
    for (int peer = 0; (operations_.running() || operations_.is_settling()) && peer < group_->size; ++peer)
      if (peer != group_->rank)
        wait_for(*group_->channels[peer], operations_.awaited_recv_bytes(peer), operations_.awaited_send_bytes(peer));
    for (const int peer : p2p.active_peers())
      wait_for(*p2p.channels()[peer], p2p.awaited_recv_bytes(peer), p2p.awaited_send_bytes(peer));
    fds.push_back(detector_.controls_pollfd());
    fds.push_back({wake_fd_.get(), POLLIN, 0});
  });
  return block && !is_dead();
}

void Engine::finish_wait(Clock::time_point now, std::span<const pollfd> asked) {
  // The last two are the control connections and the wake-up.
  const std::size_t count = asked.size();
  const bool may_be_woken = count < 2 || asked[count - 1].revents != 0;
  const bool may_be_told = count < 2 || asked[count - 2].revents != 0 || !detector_.has_looked();
  if (may_be_woken) {
    std::uint64_t ignored;
    [[maybe_unused]] const ssize_t bytes = ::read(wake_fd_.get(), &ignored, sizeof ignored);
  }
  for (Channel* channel : waited_) channel->finish_wait(now, asked);
  waited_.clear();
  if (is_dead()) return;
  fail_where_it_throws([&] {
    for (Channel* channel : maintained_) channel->maintain(now);
    if (may_be_told) detector_.check_controls();
    // A peer that is gone may have left all that is needed; look before giving up on it.
    for (int peer = 0; detector_.has_lost_any() && peer < group_->size; ++peer) {
      if (!detector_.is_missed(peer)) continue;
      while (progress()) {
      }
      if (!is_dead() && detector_.is_missed(peer)) detector_.throw_peer_lost(peer, 0);
    }
  });
  check_deadlines(now);
}

void Engine::look_after(Clock::time_point now) {
  if (is_dead()) return;
  fail_where_it_throws([&] {
    for (Channel* channel : maintained_) channel->maintain(now);
  });
  check_deadlines(now);
}

void Engine::check_deadlines(Clock::time_point now) {
  if (is_dead()) return;
  fail_where_it_throws([&] {
    if (const auto failure = detector_.check_deadlines(now)) fail(*failure);  // or throws what a peer told first
  });
}

std::optional<Clock::time_point> Engine::next_wake(Clock::time_point now) const {
  constexpr auto settling_pause = std::chrono::seconds(1);
  auto next = detector_.next_deadline();
  if (is_settling_) next = now + settling_pause;
  for (Channel* channel : maintained_) {
    const auto at = channel->next_maintenance(now);
    if (at && (!next || *at < *next)) next = at;
  }
  for (const Channel* channel : waited_) next = earliest({next, channel->next_look()});
  return next;
}

std::optional<Clock::time_point> Engine::maintain() {
  constexpr auto busy_pause = std::chrono::milliseconds(100);
  std::optional<Clock::time_point> next;
  const auto now = Clock::now();
  if (has_pending()) {
    next = now + busy_pause;  // who drives the operation looks after the channels
  } else if (!is_dead()) {
    fail_where_it_throws([&] {
      for (Channel* channel : maintained_) channel->maintain(now);
      next = next_wake(now);
    });
  }
  is_watched_ = next.has_value();
  return next;
}

std::vector<Failure> Engine::look_at_peers() {
  std::vector<Failure> vanished;
  if (is_dead() || is_inherited()) return vanished;
  {
    const std::unique_lock drive(drive_, std::try_to_lock);
    if (!drive || is_dead()) return vanished;
    fail_where_it_throws([&] { vanished = find_vanished(); });
  }
  // Who wanted to drive meanwhile left it to this thread.
  if (has_pending()) driver_.give_to_io_thread();
  return vanished;
}

void Engine::tell(const Turn& turn) noexcept {
  if (is_dead() || is_inherited()) return;
  for (const int peer : group_->neighbours) group_->controls[static_cast<std::size_t>(peer)]->send_turn(turn);
}

void Engine::tell(const Carried& carried) noexcept {
  if (is_dead() || is_inherited()) return;
  for (const int peer : group_->neighbours) group_->controls[static_cast<std::size_t>(peer)]->send_carried(carried);
}

// Nobody reads the control connections of a communicator that has nothing to do; who sends over another one asks.
void Engine::hear() noexcept {
  pollfd controls = detector_.controls_pollfd();
  if (is_dead() || is_inherited() || ::poll(&controls, 1, 0) != 1) return;
  {
    // Who drives it, this thread perhaps (POSIX: busy then, too), hears by itself.
    const std::unique_lock drive(drive_, std::try_to_lock);
    if (!drive || is_dead()) return;
    const bool had_lost_any = detector_.has_lost_any();
    try {
      detector_.check_controls();
    } catch (const std::exception&) {  // the I/O thread ends it: this one is inside of another communicator
      request_failure(current_failure());
    }
    if (detector_.has_lost_any() != had_lost_any) wake();
  }
  if (has_pending()) driver_.give_to_io_thread();
}

std::vector<Failure> Engine::find_vanished() {
  std::vector<Failure> vanished;
  const std::vector<char> lost = detector_.lost();
  detector_.check_controls();
  if (lost != detector_.lost()) wake();  // who sleeps beside an operation is not told any more
  for (int peer = 0; detector_.has_lost_any() && peer < group_->size; ++peer) {
    if (!detector_.is_lost(peer) || detector_.has_left_in_order(peer)) continue;
    try {
      detector_.throw_peer_lost(peer, 0);
    } catch (const HolmesError& error) {
      vanished.push_back(failure_of(error));
    }
  }
  return vanished;
}

// Whatever the caller does next.
void Engine::have_kept_sent() {
  constexpr auto longest_kept = std::chrono::milliseconds(2);
  if (operations_.keeps_any() && !is_dead()) io_thread_.offer(shared_from_this(), longest_kept);
}

// What was sent last is not acknowledged yet; should its rail be lost now, somebody has to send it again.
void Engine::watch() {
  have_kept_sent();
  if (is_watched_ || maintained_.empty() || is_dead() || !next_wake({})) return;  // whenever it is
  is_watched_ = true;
  io_thread_.watch(shared_from_this());
}

void Engine::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t bytes = ::write(wake_fd_.get(), &one, sizeof one);
}

void Engine::set_dead(Failure failure, bool is_error) {
  {
    std::lock_guard lock(mutex_);
    std::swap(failure_, failure);
    has_failed_ = is_error;
    dead_.store(true, std::memory_order_release);
  }
  operations_.close();
  if (std::exchange(is_settling_, false)) end_settling();
}

void Engine::fail(Failure failure) {
  if (is_dead()) return;
  if (!failure.context.rank) failure.context.rank = detector_.own_context().rank;  // for the peers, who are told
  const std::exception_ptr error = raised(failure);
  records_.take_state();  // what it waited for, while that can be told
  set_dead(failure_or(failure.kind, [&] { return failure; }), /*is_error=*/true);
  where_memory_allows([&] {
    log(LogLevel::info, group_->label(group_->rank), "communicator '" + group_->name + "' failed: " + failure.message);
  });
  tell_peers(failure);
  if (!is_internal(group_->name)) {
    where_memory_allows([&] { count_failure(group_->name, failure.kind); });
    dump_on_failure(failure.message);  // before anybody hears of the error: the process may end then
  }
  operations_.fail_all(error);
}

void Engine::tell_peers(const Failure& failure) {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    group_->controls[peer]->send_abort(failure);
    group_->channels[peer]->shutdown();
    operations_.p2p().channels()[peer]->shutdown();
  }
}

Failure Engine::abort_failure(const std::string& reason) const {
  return failure_or(ErrorKind::aborted, [&] {
    return Failure{ErrorKind::aborted,
                   "communicator '" + group_->name + "' was aborted by " + detector_.own_place() + ": " + reason,
                   detector_.own_context()};
  });
}

void Engine::request_failure(Failure failure) {
  {
    std::lock_guard lock(mutex_);
    if (!requested_failure_) requested_failure_ = std::move(failure);
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
  if (failure) fail(std::move(*failure));
}

void Engine::abort(const std::string& reason) {
  if (is_dead() || is_inherited()) return;
  request_failure(abort_failure(reason));
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) progress();
  }
  if (has_pending()) driver_.give_to_io_thread();
}

void Engine::fail_in_background(const Failure& failure) {
  if (is_dead() || is_inherited()) return;
  request_failure(failure_or(failure.kind, [&] { return failure; }));
  driver_.give_to_io_thread();
}

void Engine::close() {
  if (is_inherited()) return;
  close_requested_.store(true, std::memory_order_release);
  wake();
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) progress();
  }
  if (has_pending()) driver_.give_to_io_thread();
}

// Of peers that left in order and whose stream, where it tells its end, is read to it: all else goes on.
void Engine::end_watches() {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank || !detector_.has_left_in_order(peer)) continue;
    const P2pEngine& p2p = operations_.p2p();
    if (p2p.channels()[peer]->tells_end() && !p2p.has_ended(peer)) continue;
    const Failure failure = failure_or(ErrorKind::aborted, [&] {
      const std::string text =
          "communicator '" + group_->name + "': " + group_->controls[peer]->describe() + " " + farewell;
      return Failure{ErrorKind::aborted, text, detector_.context_of(peer)};
    });
    operations_.fail_watches(peer, raised(failure));
  }
}

// Why operations are pending when the communicator is destroyed. Where that is because a peer is gone (seen so far on
// another communicator only), that is what the others are told, not what it led to here.
Failure Engine::reason_of_pending() {
  try {
    detector_.check_controls();
    if (const auto peer = detector_.vanished_peer()) detector_.throw_peer_lost(*peer, 0);
  } catch (const std::exception&) {
    return current_failure();
  }
  return failure_or(ErrorKind::aborted, [&] {
    return Failure{
        ErrorKind::aborted,
        "communicator '" + group_->name + "' was destroyed by " + detector_.own_place() + " with operations pending",
        detector_.own_context()};
  });
}

bool Engine::settle_and_close() {
  bool moved = false;
  bool waits = false;
  if (operations_.is_empty()) {
    try {
      moved = operations_.settle();
      waits = operations_.is_unsettled(Clock::now(), [&](int peer) { return !detector_.is_lost(peer); });
    } catch (const StreamClosed&) {  // who is gone owes nothing
    }
  }
  if (!waits) {
    close_now();
    return true;
  }
  if (!std::exchange(is_settling_, true)) begin_settling();
  return moved;
}

void Engine::close_now() {
  close_requested_.store(false, std::memory_order_release);
  if (failure_requested_.load(std::memory_order_acquire)) fail_as_requested();
  fail_where_it_throws([&] {
    if (!is_dead() && operations_.has_new()) operations_.take_new();
  });
  if (is_dead()) return;
  const Failure destroyed = failure_or(ErrorKind::aborted, [&] {
    return Failure{ErrorKind::aborted, "communicator '" + group_->name + "' was destroyed here", {}};
  });
  operations_.fail_watches(std::nullopt, raised(destroyed));
  if (has_pending()) {
    fail(reason_of_pending());
    return;
  }
  const auto unusable = [] { return Failure{ErrorKind::usage, "it was destroyed", {}}; };
  set_dead(failure_or(ErrorKind::usage, unusable), /*is_error=*/false);
  for (int peer = 0; peer < group_->size; ++peer) {
    if (peer == group_->rank) continue;
    const std::array channels{group_->channels[peer].get(), operations_.p2p().channels()[peer].get()};
    // A ring's end is marked before the farewell has the peer look for it; a socket's says less than the farewell.
    for (Channel* channel : channels)
      if (!channel->tells_end()) channel->shutdown();
    group_->controls[peer]->send_bye();
    // Unread bytes would turn the orderly end into a reset.
    where_memory_allows([&] { [[maybe_unused]] const auto ignored = group_->controls[peer]->drain(); });
    for (Channel* channel : channels) channel->shutdown();
  }
}

}  // namespace holmes
