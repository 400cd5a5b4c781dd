#include "holmes/engine/driver.hpp"

#include "holmes/core/cpu_list.hpp"
#include "holmes/engine/engine.hpp"

namespace holmes {
namespace {

// What a caller leaves goes to the I/O thread after so long: until a caller would have come to wait for it
// (from Python 3 to 10 us; a sleeping thread takes 25 to 35 us to wake in a virtual machine), and longer where callers
// always did, as arming a timer costs 10 us there that is due before the kernel's next tick.
constexpr std::chrono::microseconds short_patience{30};
constexpr std::chrono::milliseconds long_patience{1};
constexpr unsigned prompt_waits_for_long = 16;
// Rounds without blocking after which deadlines are looked at.
constexpr unsigned rounds_per_deadline_check = 512;
// The same for signals; of much data, where a round takes a while.
constexpr unsigned rounds_per_signal_check = 128;
// Polls in which nothing moved after which peers and rails are looked at, in three system calls.
constexpr unsigned polls_per_check = 64;
// Waits that ended before they began, as something was ready, of which one looks at peers.
constexpr unsigned ready_waits_per_look = 16;
// Of one poll, so that a caller with other work comes back to it.
constexpr int max_rounds_of_poll = 16;

}  // namespace

bool Driver::run_here(std::unique_ptr<Collective>& collective) {
  bool pauses = false;
  {
    std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
    if (!drive) return false;
    const std::shared_ptr<Work> work = collective->shared_work();
    if (!engine_.operations().submit_own(collective)) return false;
    take_back();
    pauses = drive_until(*work, std::nullopt, work->submitted());
    if (!engine_.has_pending()) engine_.watch();
  }
  leave_rest(pauses);
  return true;
}

// A message needs one peer, which may have a processor to itself; a collective all of them.
bool Driver::may_rush(bool is_collective) const {
  const Group& group = engine_.group();
  return group.all_shared_memory && (group.size <= online_processors() || !is_collective);
}

template <typename Look>
bool Driver::poll_short(bool is_collective, CallerLock* held, const Look& look) {
  ShortState state = look();
  if (state != ShortState::awaited) return state == ShortState::ready;
  if (engine_.operations().keeps_payload()) engine_.operations().send_kept();
  auto spin = spin_.begin(may_rush(is_collective));
  while (state == ShortState::awaited && !engine_.is_wanted()) {
    if (held && !spin.is_rushing()) held->let_go();
    if (!spin.goes_on()) break;
    state = look();
  }
  has_polled_ = state == ShortState::awaited;
  if (!has_polled_) spin_.succeeded(spin);
  return state == ShortState::ready;
}

std::size_t Driver::run_short(std::span<ShortMessage> messages, Duration timeout, CallerLock* held) {
  std::size_t carried = 0;
  {
    const std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
    if (!drive || !engine_.is_idle()) return 0;
    Operations& operations = engine_.operations();
    const auto submitted = operations.short_now();
    for (ShortMessage& message : messages) {
      const std::shared_ptr<Work>& completed = operations.completed(message.is_send ? -1 : message.peer);
      const auto look = [&] { return operations.carry_short(message, submitted, timeout); };
      try {
        if (!(message.is_send ? look() == ShortState::ready : poll_short(/*is_collective=*/false, held, look))) break;
      } catch (const std::bad_alloc&) {
        engine_.fail_short([&] { return "a message of communicator '" + engine_.group().name + "'"; });
        break;
      }
      message.completed = completed;
      ++carried;
    }
  }
  leave_rest(/*pauses=*/false);
  return carried;
}

ShortRun::ShortRun(Driver& driver, ShortCall& called, Duration timeout, CallerLock* held)
    : driver_(driver), called_(called), drive_(driver.engine_.drive_lock(), std::try_to_lock) {
  Engine& engine = driver_.engine_;
  if (!drive_ || !engine.is_idle()) return;
  Operations& operations = engine.operations();
  const std::shared_ptr<Work>& completed = operations.completed(-1);  // made before others are in it
  const auto polls = [&](const auto& look) {
    try {
      return driver_.poll_short(/*is_collective=*/true, held, look);
    } catch (...) {  // it happens again to who goes on
      return false;
    }
  };
  if (operations.lacks_room() && !polls([&] { return operations.catch_up(); })) return;
  begun_ = operations.begin_short(called, timeout);
  if (!begun_.is_begun) return;
  state_ = State::begun;
  if (!begun_.all_gone) return;
  if (!polls([&] { return operations.take_short(called, begun_.record, begun_.submitted + timeout); })) return;
  state_ = State::done;
  completed_ = completed;
  engine.have_kept_sent();
  drive_.unlock();
  driver_.leave_rest(/*pauses=*/false);
}

ShortRun::~ShortRun() {
  if (state_ != State::begun || !drive_) return;
  driver_.engine_.fail_short([&] { return describe(called_.signature(), driver_.engine_.group().name); });
}

void ShortRun::go_on(std::unique_ptr<Collective> collective) {
  const std::shared_ptr<Work> work = collective->shared_work();
  driver_.engine_.operations().go_on(std::move(collective), called_, begun_.record);
  const bool pauses = driver_.drive_until(*work, std::nullopt, std::nullopt);
  drive_.unlock();
  driver_.leave_rest(pauses);
}

void Driver::run_in_background(std::size_t bytes) {
  if (Engine::drives_in_this_thread()) {  // what follows another operation, which no caller waits for
    if (engine_.has_pending()) give_to_io_thread();
    return;
  }
  // So much is sent sooner than another thread is woken for it. (What the sockets do not take is left, and so is what
  // was left before, but for one round.)
  constexpr std::size_t max_bytes_here = 1024 * 1024;
  constexpr int max_rounds_here = 20;  // shared memory takes 64 KiB in each
  if (bytes <= max_bytes_here) {
    std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
    if (drive) {
      int rounds = is_offered_.load() ? 1 : max_rounds_here;
      while (engine_.progress() && --rounds > 0 && engine_.has_pending()) {
      }
      if (!engine_.has_pending()) engine_.watch();
    }
  }
  if (!is_polled_ && engine_.has_pending()) offer();
}

void Driver::poll() {
  std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
  if (!drive) return;
  int rounds = 0;
  while (rounds < max_rounds_of_poll && engine_.progress()) ++rounds;
  if (rounds == 0 && ++idle_polls_ % polls_per_check == 0) engine_.finish_wait(Clock::now());
  if (!engine_.has_pending()) engine_.watch();
}

void Driver::offer() {
  const bool is_long = prompt_waits_.load(std::memory_order_relaxed) >= prompt_waits_for_long;
  offer(is_long ? Duration(long_patience) : Duration(short_patience));
}

void Driver::offer(Duration patience) {
  offered_at_.store(Clock::now(), std::memory_order_relaxed);
  is_offered_.store(true);
  io_thread_.offer(engine_.shared_from_this(), patience);
}

// What was offered to the I/O thread, and is there still.
void Driver::take_back() {
  if (!is_offered_.exchange(false)) return;
  io_thread_.take_back(engine_);
  const bool is_prompt = Clock::now() - offered_at_.load(std::memory_order_relaxed) < short_patience;
  prompt_waits_.store(is_prompt ? prompt_waits_.load(std::memory_order_relaxed) + 1 : 0, std::memory_order_relaxed);
}

// What the caller does not drive any more goes on in the background; after a while, as it may only look for signals, or
// wait for the next of several operations. At once where a thread sleeps until it is done.
void Driver::leave_rest(bool pauses) {
  if (!engine_.has_pending()) return;
  if (is_polled_ || is_awaited_.exchange(false))
    give_to_io_thread();
  else if (pauses)
    offer(long_patience);
  else
    offer();
}

void Driver::give_to_io_thread() { io_thread_.add(engine_.shared_from_this()); }

bool Driver::help(const Work& work, std::optional<Clock::time_point> until, std::optional<Clock::time_point> now,
                  std::span<const std::shared_ptr<Work>> following) {
  engine_.throw_if_inherited();
  bool pauses = false;
  {
    std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
    if (!drive) {  // the other thread may be about to stop
      is_awaited_.store(true);
      if (engine_.has_pending()) give_to_io_thread();
      return false;
    }
    take_back();
    pauses = drive_until(work, until, now);
    const Work* last = &work;
    for (auto next = following.begin(); next != following.end() && last->is_final(); ++next) {
      last = next->get();
      if (!last->is_final()) pauses = drive_until(*last, until, std::nullopt);
    }
    if (!engine_.has_pending()) engine_.watch();
  }
  leave_rest(pauses);
  return pauses;
}

// True where the work goes on, but it is time to look for signals. A look at the clock is a system call where the
// kernel has no vDSO: so `now`, where it is known, holds until something has moved or was waited for.
bool Driver::drive_until(const Work& work, std::optional<Clock::time_point> until,
                         std::optional<Clock::time_point> now) {
  const bool rushes = may_rush(engine_.operations().running() != nullptr);
  auto spin = spin_.begin(rushes);
  bool has_polled = std::exchange(has_polled_, false);
  SignalTimer signals;
  unsigned rounds = 0;
  unsigned waits = 0;
  bool is_slow = false;  // the network of this work: its last pieces are waited for asleep too
  while (true) {
    const bool moved = engine_.progress();
    if (moved || work.is_final()) {
      if (spin.has_begun()) {
        spin_.succeeded(spin);
        spin = spin_.begin(rushes);
      }
      if (work.is_final()) return false;
    }
    if (++rounds % rounds_per_deadline_check == 0) engine_.look_after(Clock::now());
    if (rounds % rounds_per_signal_check == 0 && signals.is_due()) return true;
    if (moved) {
      now.reset();
      continue;
    }
    if (engine_.operations().keeps_payload()) engine_.operations().send_kept();
    if (waits_for_bulk()) {
      now.reset();
      Clock::time_point after;
      is_slow |= wait_for_bulk(until, signals, after);
      if (until && after >= *until) return false;
      if (signals.is_due(after)) return true;
      continue;
    }
    if (!has_polled && !is_slow && spin_.allows(waits) && spin.goes_on()) {
      now.reset();
      continue;
    }
    ++waits;
    has_polled = false;
    fds_.clear();
    const bool block = engine_.prepare_wait(fds_);
    const auto before = now ? *now : Clock::now();
    now.reset();
    if (block) sleep(until, signals, before);
    const auto after = block ? Clock::now() : before;
    if (block)
      engine_.finish_wait(after, fds_);
    else
      finish_ready_wait(after);
    engine_.group().clock.set(after);
    if (block) spin_.slept(after - before);
    spin = spin_.begin(rushes);
    if (until && after >= *until) return false;
    if (block && signals.is_due(after)) return true;
  }
}

// Who always finds something ready asks the system for nothing, but looks now and then whether a peer has told of a
// failure.
void Driver::finish_ready_wait(Clock::time_point now) {
  const bool looks = ++ready_waits_ % ready_waits_per_look == 0;
  engine_.finish_wait(now, looks ? std::span<const pollfd>{} : fds_);
}

// Until one of `fds_` is ready, something is due, or `until`.
void Driver::sleep(std::optional<Clock::time_point> until, SignalTimer& signals, Clock::time_point now) {
  if (!poll_until(fds_, earliest({engine_.next_wake(now), until, signals.due(now)}), now)) signals.ring();
}

// Whether much is awaited, over sockets only. What comes with shared memory is asked for too quickly to sleep.
bool Driver::waits_for_bulk() const {
  constexpr std::size_t bulk_bytes = 64 * 1024;
  const Group& group = engine_.group();
  if (group.any_shared_memory) return false;
  std::size_t total = 0;
  Collective* running = engine_.operations().running();
  const P2pEngine& p2p = engine_.operations().p2p();
  for (int peer = 0; running && peer < group.size; ++peer)
    if (peer != group.rank) total += running->awaited_recv_bytes(peer) + running->awaited_send_bytes(peer);
  for (const int peer : p2p.active_peers()) total += p2p.awaited_recv_bytes(peer) + p2p.awaited_send_bytes(peer);
  return total >= bulk_bytes;
}

// Waits until a whole piece is there. Where that took less than the spin lately (a fast network, or peers that run on
// this processor meanwhile), it asks again and again; on a slow network it sleeps, and what comes while it sleeps costs
// no processor time. Returns whether it slept for longer than the spin. `after`: when it ended.
bool Driver::wait_for_bulk(std::optional<Clock::time_point> until, SignalTimer& signals, Clock::time_point& after) {
  fds_.clear();
  const bool block = engine_.prepare_wait(fds_);
  const auto start = Clock::now();
  if (!block) {
    finish_ready_wait(start);
    after = start;
    return false;
  }
  bool is_ready = false;
  auto asleep_at = start;
  if (spin_.allows_bulk()) {
    auto spin = spin_.begin(/*may_rush=*/false);
    while (!is_ready && spin.goes_on()) is_ready = ::poll(fds_.data(), fds_.size(), 0) != 0;
    if (!is_ready && spin.has_begun()) asleep_at = Clock::now();
  }
  if (!is_ready) sleep(until, signals, asleep_at);
  after = Clock::now();
  engine_.finish_wait(after, fds_);
  engine_.group().clock.set(after);
  return spin_.waited_for_bulk(after - start, !is_ready);
}

}  // namespace holmes
