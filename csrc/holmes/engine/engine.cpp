#include "holmes/engine/engine.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/engine/io_thread.hpp"

namespace holmes {
namespace {

// What run_in_background leaves goes to the I/O thread after so long: until a caller would have come to wait for it
// (from Python 3 to 10 us; a sleeping thread takes 25 to 35 us to wake in a virtual machine), and longer where callers
// always did, as arming a timer costs 10 us there that is due before the kernel's next tick.
constexpr std::chrono::microseconds patience{30};
constexpr std::chrono::milliseconds long_patience{1};
constexpr unsigned prompt_waits_for_long = 16;

// Operations started by what follows another one's end (Work::on_final) are not driven inside of it.
thread_local bool this_thread_drives = false;

}  // namespace

Engine::Engine(std::unique_ptr<Group> group, std::vector<std::unique_ptr<Channel>> p2p_channels, std::string own_place,
               Duration spin, IoThread& io_thread, UniqueFd wake_fd, std::vector<int> sockets)
    : group_(std::move(group)),
      wake_fd_(std::move(wake_fd)),
      p2p_(*group_, std::move(p2p_channels), wake_fd_.get()),
      own_place_(std::move(own_place)),
      spin_(spin),
      io_thread_(io_thread),
      sockets_(std::move(sockets)),
      lost_(static_cast<std::size_t>(group_->size)) {
  for (const auto* channels : {&std::as_const(group_->channels), &p2p_.channels()})
    for (const auto& channel : *channels)
      if (channel && channel->needs_care()) tended_.push_back(channel.get());
}

Engine::~Engine() { hand_over(); }

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
  std::lock_guard lock(mutex_);
  return failure_;
}

void Engine::submit(std::unique_ptr<Collective> collective) {
  std::unique_lock lock(mutex_);
  if (!is_dead()) {
    collective->set_sequence(next_sequence_++);
    record_call(*collective, WorkState::queued);
    inbox_.emplace_back(std::move(collective));
    inbox_filled_.store(true, std::memory_order_release);
    return;
  }
  lock.unlock();
  throw_if_dead();
}

bool Engine::run_here(std::unique_ptr<Collective>& collective) {
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (!drive) return false;
    {
      std::lock_guard lock(mutex_);
      if (is_dead() || inbox_filled_.load(std::memory_order_relaxed)) return false;
      collective->set_sequence(next_sequence_++);
      record_call(*collective, queue_.empty() ? WorkState::running : WorkState::queued);
      driver_pending_.fetch_add(1);
    }
    const std::shared_ptr<Work> work = collective->shared_work();
    queue_.push_back(std::move(collective));
    drive_until(*work, std::nullopt);
    if (!has_pending()) watch();
  }
  if (has_pending()) give_to_io_thread();
  return true;
}

void Engine::submit(std::vector<P2pEngine::Request> requests) {
  std::unique_lock lock(mutex_);
  if (!is_dead()) {
    for (auto& request : requests) {
      record_call(request);
      inbox_.emplace_back(std::move(request));
    }
    inbox_filled_.store(true, std::memory_order_release);
    return;
  }
  lock.unlock();
  throw_if_dead();
}

void Engine::run_in_background(std::size_t bytes) {
  if (this_thread_drives) {  // what follows another operation, which nobody comes to wait for
    if (has_pending()) give_to_io_thread();
    return;
  }
  // So much is sent sooner than another thread is woken for it. (What the sockets do not take is left, and so is what
  // was left before, but for one round.)
  constexpr std::size_t max_bytes_here = 1024 * 1024;
  constexpr int max_rounds_here = 20;  // shared memory takes 64 KiB in each
  if (bytes <= max_bytes_here) {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) {
      int rounds = is_offered_.load() ? 1 : max_rounds_here;
      while (progress() && --rounds > 0 && has_pending()) {
      }
      if (!has_pending()) watch();
    }
  }
  if (!has_pending()) return;
  offered_at_.store(Clock::now(), std::memory_order_relaxed);
  is_offered_.store(true);
  const bool is_long = prompt_waits_.load(std::memory_order_relaxed) >= prompt_waits_for_long;
  io_thread_.offer(shared_from_this(), is_long ? Duration(long_patience) : Duration(patience));
}

void Engine::wait_expired() { prompt_waits_.store(0, std::memory_order_relaxed); }

void Engine::give_to_io_thread() { io_thread_.add(shared_from_this()); }

bool Engine::has_pending() const {
  return inbox_filled_.load(std::memory_order_acquire) || failure_requested_.load(std::memory_order_acquire) ||
         close_requested_.load(std::memory_order_acquire) || driver_pending_.load(std::memory_order_acquire) > 0;
}

void Engine::help(const Work& work, std::optional<Clock::time_point> until) {
  throw_if_inherited();
  {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) {
      if (is_offered_.exchange(false)) {
        io_thread_.take_back(*this);
        const bool is_prompt = Clock::now() - offered_at_.load(std::memory_order_relaxed) < patience;
        prompt_waits_.store(is_prompt ? prompt_waits_.load(std::memory_order_relaxed) + 1 : 0,
                            std::memory_order_relaxed);
      }
      drive_until(work, until);
      if (!has_pending()) watch();
    }
  }
  // Whatever is left (also where another thread drives and is about to stop) goes on in the background.
  if (has_pending()) give_to_io_thread();
}

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
    fail_as_requested();
    return true;
  }
  if (close_requested_.load(std::memory_order_acquire)) {
    close_now();
    return true;
  }
  if (inbox_filled_.load(std::memory_order_acquire)) take_inbox();
  if (state_requested_.load(std::memory_order_relaxed)) take_state();
  bool moved = false;
  if (!queue_.empty()) {
    Collective& running = *queue_.front();
    if (!front_started_) {
      front_started_ = true;
      running.work().mark_running();
      // One that follows another begins when that one ends.
      group_->recorder->start(running.record(), std::max(running.work().submitted(), last_end_));
      running.start();
    }
    moved = running.advance();
    if (running.is_done()) {
      running.end();
      const std::unique_ptr<Collective> finished = std::move(queue_.front());
      queue_.pop_front();
      front_started_ = false;
      driver_pending_.fetch_sub(1);
      last_end_ = Clock::now();
      group_->recorder->finish(finished->record(), true, last_end_);
      finished->work().complete(last_end_);
      moved = true;
    }
  }
  if (!p2p_.is_idle()) {
    const std::size_t before = p2p_.pending();
    moved |= p2p_.advance();
    driver_pending_.fetch_sub(static_cast<int>(before - p2p_.pending()));
    if (p2p_.watches() > 0) end_watches();
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
    const std::uint64_t record = request.record;
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
      group_->recorder->finish(record, false, Clock::now());
      fail(failure_of(error), work);
      return;
    }
  }
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
