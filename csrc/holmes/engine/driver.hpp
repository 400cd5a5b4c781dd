// Driver: who moves an engine's bytes: the calling thread (lowest latency), else its I/O thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "holmes/collectives/collective.hpp"
#include "holmes/collectives/short_call.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/engine/io_thread.hpp"
#include "holmes/engine/operations.hpp"
#include "holmes/engine/spin_policy.hpp"
#include "holmes/p2p/p2p.hpp"

namespace holmes {

class Engine;

// Thread-safe: whoever gets the engine's drive lock drives.
class Driver {
public:
  // `spin`: how long a calling thread polls before it sleeps.
  Driver(Engine& engine, Duration spin, IoThread& io_thread) : engine_(engine), spin_(spin), io_thread_(io_thread) {}

  // Submits and drives it in the calling thread until it is final, or it is time to look for signals. Returns false,
  // having done nothing, where another thread drives or other calls wait for their turn.
  bool run_here(std::unique_ptr<Collective>& collective);
  // Carries messages out in the calling thread, in order, as long as each can be sent whole or comes while it polls,
  // and nothing else is under way. Returns how many.
  std::size_t run_short(std::span<ShortMessage> messages, Duration timeout, CallerLock* held);
  // Leaves what is queued to the I/O thread, unless a caller waits for it first; of small operations only what cannot
  // be done here at once.
  void run_in_background(std::size_t bytes);
  // Drives in the calling thread until `work` is final, and all `following`, or `until`. Returns at once where another
  // thread drives. True where it is time to look for signals before it goes on. `now`: for who has just looked at the
  // clock.
  bool help(const Work& work, std::optional<Clock::time_point> until, std::optional<Clock::time_point> now = {},
            std::span<const std::shared_ptr<Work>> following = {});
  void give_to_io_thread();
  // From now on asynchronous operations wait for `poll`, which the caller calls until they are done. Before the first
  // one.
  void set_polled() { is_polled_ = true; }
  // Moves what can be moved, in the calling thread, without blocking; nothing where another thread drives.
  void poll();
  // No caller came in time for what was left to the I/O thread.
  void offer_expired() { prompt_waits_.store(0, std::memory_order_relaxed); }

private:
  friend class ShortRun;
  // Polls until `look()` finds it ready, as long as that is worth it, it may come to be and nobody else wants the
  // engine. Returns whether it is. `held`: let go of once it leaves the processor to others; may be null.
  template <typename Look>
  bool poll_short(bool is_collective, CallerLock* held, const Look& look);
  bool may_rush(bool is_collective) const;
  void take_back();
  bool drive_until(const Work& work, std::optional<Clock::time_point> until, std::optional<Clock::time_point> now);
  void finish_ready_wait(Clock::time_point now);
  void sleep(std::optional<Clock::time_point> until, SignalTimer& signals, Clock::time_point now);
  bool waits_for_bulk() const;
  bool wait_for_bulk(std::optional<Clock::time_point> until, SignalTimer& signals, Clock::time_point& after);
  void offer();
  void offer(Duration patience);
  void leave_rest(bool pauses);

  Engine& engine_;
  SpinPolicy spin_;          // with the drive lock, as the following
  bool has_polled_ = false;  // in vain, for a short call that goes on
  std::vector<pollfd> fds_;
  IoThread& io_thread_;
  std::atomic<bool> is_offered_{false};  // to the I/O thread, perhaps
  std::atomic<Clock::time_point> offered_at_{};
  std::atomic<unsigned> prompt_waits_{0};  // how often in a row a caller came for what was left in time
  std::atomic<bool> is_awaited_{false};    // by a thread that sleeps, as another one drove when it came
  std::atomic<bool> is_polled_{false};
  unsigned idle_polls_ = 0;  // with the drive lock, as the next one
  unsigned ready_waits_ = 0;
};

// A short collective in the calling thread, which drives meanwhile. Its first part sends; what has not come while it
// polled goes on as `collective`, of the same call, as in Driver::run_here.
class ShortRun {
public:
  enum class State { not_begun, begun, done };

  // Not begun where another thread drives or something else is under way.
  ShortRun(Driver& driver, ShortCall& called, Duration timeout, CallerLock* held);
  ShortRun(const ShortRun&) = delete;
  ShortRun& operator=(const ShortRun&) = delete;
  // Others are in it: where nothing went on with it the communicator ends.
  ~ShortRun();

  State state() const { return state_; }
  Clock::time_point submitted() const { return begun_.submitted; }
  const std::shared_ptr<Work>& completed() const { return completed_; }
  void go_on(std::unique_ptr<Collective> collective);

private:
  Driver& driver_;
  ShortCall& called_;
  std::unique_lock<std::mutex> drive_;
  State state_ = State::not_begun;
  Operations::ShortBegin begun_;
  std::shared_ptr<Work> completed_;
};

}  // namespace holmes
