// Engine: one communicator at work: its operations, its peers, and how it ends. Whoever holds the drive lock drives it
// (see Driver).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "holmes/core/fork.hpp"
#include "holmes/engine/driver.hpp"
#include "holmes/engine/engine_records.hpp"
#include "holmes/engine/failure_detector.hpp"
#include "holmes/engine/operations.hpp"

namespace holmes {

// Thread-safe except where "driver" is said: that needs the drive lock.
class Engine final : public std::enable_shared_from_this<Engine>, public UplinkNeighbours, public WholePart {
public:
  // `io_thread` drives what no caller does; `wake_fd` is an event descriptor. `sockets` are the ones of the group and
  // the channels: a forked child has none of them.
  Engine(std::unique_ptr<Group> group, std::vector<std::unique_ptr<Channel>> p2p_channels, std::string own_place,
         Duration spin, IoThread& io_thread, UniqueFd wake_fd, std::vector<int> sockets);
  ~Engine() override;

  // Queues operations; their sequence numbers are set here. Throws the failure where the communicator is dead.
  void submit(std::unique_ptr<Collective> collective);
  void submit(std::vector<P2pEngine::Request> requests);
  Driver& driver() { return driver_; }
  Group& group() { return *group_; }
  EngineRecords& records() { return records_; }
  std::vector<ConnectionInfo> connections() const;
  // Whether a message to or from `peer` may go the short way.
  bool takes_short(int peer, std::size_t in_a_row) const {
    return operations_.p2p().channels()[static_cast<std::size_t>(peer)]->takes_short(in_a_row);
  }

  // --- how it ends ---
  void abort(const std::string& reason);
  // As abort, with this failure; the I/O thread does it, so callbacks of works may call it.
  void fail_in_background(const Failure& failure);
  // What abort makes of `reason`.
  Failure abort_failure(const std::string& reason) const;
  // Tells the peers and ends everything; pending operations fail with AbortedError. Never blocks: where another thread
  // drives, the I/O thread does it a little later. (That thread may be waiting for a lock of the caller, Python's GIL.)
  void close();
  bool is_dead() const { return dead_.load(std::memory_order_acquire); }
  void throw_if_dead() const;
  // In a forked child, where nothing drives it and its locks may be held for ever: nothing but the following may be
  // called there, and what does not report anything, which does nothing.
  bool is_inherited() const { return epoch_ != fork_epoch(); }
  void throw_if_inherited() const;
  // What ended it; nothing while it lives.
  std::optional<Failure> failure() const;
  // Whether that was an error.
  bool has_failed() const { return has_failed_; }

  // --- for who drives it ---
  std::mutex& drive_lock() { return drive_; }
  // The driver, where it sleeps, looks at what is new. Any thread.
  void wake() const override;
  // Any thread.
  bool has_pending() const;
  // Whether the calling thread is inside of `progress`, of any engine.
  static bool drives_in_this_thread();
  // Driver. Whether nothing is under way, so that a short call may be run whole / somebody wants a driver's rounds.
  bool is_idle() const { return operations_.is_empty() && !is_dead() && !is_wanted(); }
  bool is_wanted() const;
  // Driver. Of a short call that has begun and that memory was too short to go on with, as `describe` says it.
  void fail_short(const std::function<std::string()>& describe);
  // Driver. One round; returns whether anything moved. Errors make the communicator dead, they are not thrown.
  bool progress();
  // Driver. Appends what to poll for; false: something is ready, do not block.
  bool prepare_wait(std::vector<pollfd>& fds);
  // Driver. After blocking: looks at the control connections and deadlines. `asked`: what prepare_wait has appended, as
  // poll answered it, or with nothing ready where it was not called; where it is given, the system is asked for nothing
  // that is not ready.
  void finish_wait(Clock::time_point now, std::span<const pollfd> asked = {});
  // Driver, from time to time where it does not wait: looks after the channels, and ends the communicator where an
  // operation is late.
  void look_after(Clock::time_point now);
  // Driver. When to look again though nothing is ready: the earliest deadline, or a channel that needs maintenance.
  std::optional<Clock::time_point> next_wake(Clock::time_point now) const;
  // Driver. Asks the I/O thread to call maintain as long as needed, and send_kept before long.
  void watch();
  // Any thread. Asks the I/O thread to call send_kept before long, where there is need.
  void have_kept_sent();
  // Driver. See Operations.
  void send_kept() { operations_.send_kept(); }
  // Driver. Looks after the channels while nothing is pending. Returns when to do so again; absent: no need.
  std::optional<Clock::time_point> maintain();
  // Any thread, see HostCommunicator.
  std::vector<Failure> look_at_peers();
  // Any thread: turns on an uplink, and what is carried over it. Who holds neither lock nor end of this may call them.
  void tell(const Turn& turn) noexcept override;
  void tell(const Carried& carried) noexcept override;
  void hear() noexcept override;
  // Driver.
  Operations& operations() { return operations_; }
  // Driver. For the flight record.
  DriverState state() const { return operations_.state(detector_.lost()); }

private:
  void check_deadlines(Clock::time_point now);
  std::vector<Failure> find_vanished();
  bool progress_or_fail();
  bool progress_or_throw();
  void end_watches();
  // What ends an operation, or all of them, throws nothing and is done where memory is short too.
  void request_failure(Failure failure);
  void fail_as_requested();
  void fail(Failure failure);
  void tell_peers(const Failure& failure);
  // Fails with what `action` throws.
  template <typename Action>
  void fail_where_it_throws(const Action& action);
  // Of the exception that is being handled.
  Failure current_failure() const;
  // Before it closes it waits for what others owe to operations that have ended here. Returns whether anything moved.
  bool settle_and_close();
  void close_now();
  Failure reason_of_pending();
  // Nothing is submitted any more, every later call throws `failure`.
  void set_dead(Failure failure, bool is_error);

  std::unique_ptr<Group> group_;
  UniqueFd wake_fd_;
  Operations operations_;
  FailureDetector detector_;
  EngineRecords records_;
  IoThread& io_thread_;
  IoThread::Place io_place_;
  Driver driver_;
  std::uint64_t epoch_ = fork_epoch();
  UninheritedSockets sockets_;
  std::mutex drive_;
  bool is_settling_ = false;          // driver; counted for the end of the process
  std::vector<Channel*> maintained_;  // channels that need maintenance
  std::vector<Channel*> waited_;      // channels whose wait is prepared and not finished
  bool is_watched_ = false;           // driver; the I/O thread calls maintain

  mutable std::mutex mutex_;  // protects the failures
  Failure failure_;
  std::optional<Failure> requested_failure_;
  bool has_failed_ = false;
  std::atomic<bool> failure_requested_{false};
  std::atomic<bool> close_requested_{false};
  std::atomic<bool> dead_{false};
};

}  // namespace holmes
