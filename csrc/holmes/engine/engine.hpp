// Engine: drives the operations of one communicator. Whoever holds the drive lock moves the bytes: the calling thread
// of a synchronous operation (lowest latency), else its I/O thread.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <variant>

#include "holmes/collectives/collective.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/p2p/p2p.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes {

class IoThread;

// Thread-safe except where "driver" is said: that needs the drive lock.
class Engine : public RecordSource, public std::enable_shared_from_this<Engine> {
public:
  // `io_thread` drives what no caller does; `wake_fd` is an event descriptor. `sockets` are the ones of the group and
  // the channels: a forked child has none of them.
  Engine(std::unique_ptr<Group> group, std::vector<std::unique_ptr<Channel>> p2p_channels, std::string own_place,
         Duration spin, IoThread& io_thread, UniqueFd wake_fd, std::vector<int> sockets);
  ~Engine() override;

  // Queues an operation; its sequence number is set here. Throws the failure where the communicator is dead.
  void submit(std::unique_ptr<Collective> collective);
  // Submits and drives it in the calling thread until it is final. Returns false, having done nothing, where another
  // thread drives or other calls wait for their turn.
  bool run_here(std::unique_ptr<Collective>& collective);
  void submit(std::vector<P2pEngine::Request> requests);
  // Leaves what is queued to the I/O thread, unless a caller waits for it first; of small operations only what cannot
  // be done here at once.
  void run_in_background(std::size_t bytes);
  // Drives in the calling thread until `work` is final or `until`. Returns at once where another thread drives.
  void help(const Work& work, std::optional<Clock::time_point> until);
  // Nobody came to wait for what run_in_background left. Any thread.
  void wait_expired();

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
  Group& group() { return *group_; }
  std::vector<ConnectionInfo> connections() const;

  // --- for the flight record and metrics: engine_record.cpp ---
  // What all ranks said of themselves, and the communicator's number.
  void set_identities(std::uint64_t id, std::vector<PeerIdentity> ranks);
  void request_state() override;
  CommunicatorRecord record(Clock::time_point until) override;
  CommunicatorMetrics metrics() override;

  // --- for the I/O thread and help: the drive lock and what it protects ---
  std::mutex& drive_lock() { return drive_; }
  // The driver, where it sleeps, looks at what is new. Any thread.
  void wake() const;
  bool has_pending() const;
  // Driver. One round; returns whether anything moved. Errors make the communicator dead, they are not thrown.
  bool progress();
  // Driver. Appends what to poll for; false: something is ready, do not block.
  bool prepare_wait(std::vector<pollfd>& fds);
  // Driver. After blocking: looks at the control connections and deadlines.
  void finish_wait();
  // Driver. When to look again though nothing is ready: the earliest deadline, or a channel that needs care.
  std::optional<Clock::time_point> next_wake() const;
  // Driver. Asks the I/O thread to call take_care as long as needed.
  void watch();
  // Driver. Looks after the channels while nothing is pending. Returns when to do so again; absent: no need.
  std::optional<Clock::time_point> take_care();

private:
  using Submission = std::variant<std::unique_ptr<Collective>, P2pEngine::Request>;

  bool progress_or_fail();
  bool progress_or_throw();
  void take_inbox();
  void check_controls();
  void check_deadlines();
  // By rank; nothing where it gave no sign of life.
  using RollCall = std::vector<std::optional<Presence>>;
  RollCall call_roll();
  std::optional<int> unanswered_peer() const;
  // A path that nothing gets through, as this rank or one that answered sees it; this rank is never `far`.
  struct Cut {
    int near;
    int far;
    std::string nic;
  };
  std::optional<Cut> find_cut(const RollCall& answers) const;
  std::optional<Clock::time_point> next_deadline() const;
  [[noreturn]] void throw_peer_lost(int peer, int system_errno);
  [[noreturn]] void throw_stream_closed(const StreamClosed& closed);
  std::string describe_running() const;
  // Of an error that this rank sees and `peer` is to blame for.
  ErrorContext context_of(int peer) const;
  bool involves(int peer) const;
  bool is_missed(int peer) const;
  void request_failure(const Failure& failure);
  void fail_as_requested();
  void fail(const Failure& failure, std::shared_ptr<Work> also = nullptr);
  void end_watches();
  void close_now();
  Failure reason_of_pending();
  void drive_until(const Work& work, std::optional<Clock::time_point> until);
  void sleep(std::optional<Clock::time_point> until);
  bool waits_for_bulk();
  bool wait_for_bulk(std::optional<Clock::time_point> until);
  bool goes_on_spinning(std::optional<Clock::time_point>& start, std::optional<Duration>& end) const;
  void give_to_io_thread();
  void record_call(Collective& collective, WorkState state);
  void record_call(P2pEngine::Request& request);
  void take_state();
  void hand_over();

  std::unique_ptr<Group> group_;
  UniqueFd wake_fd_;
  P2pEngine p2p_;
  std::string own_place_;  // "rank 0 (host a0)"
  Duration spin_;
  IoThread& io_thread_;
  std::uint64_t epoch_ = fork_epoch();
  UninheritedSockets sockets_;

  std::mutex drive_;
  std::deque<std::unique_ptr<Collective>> queue_;  // driver; the front one runs
  bool front_started_ = false;
  Clock::time_point last_end_{};                 // driver; of a collective
  std::vector<char> lost_;                       // driver; by rank: the control connection ended
  std::vector<Channel*> tended_;                 // channels that need care
  bool is_watched_ = false;                      // driver; the I/O thread calls take_care
  std::optional<Clock::time_point> verdict_at_;  // driver; deadlines have passed, but others may know more until then
  unsigned spin_misses_ = 0;                     // waits in a row that outlived the spin
  unsigned bulk_misses_ = 0;  // of waits for much: one more for each that did, one less for each that did not
  unsigned bulk_waits_ = 0;   // since most of them did
  std::atomic<bool> is_offered_{false};  // to the I/O thread, perhaps
  std::atomic<Clock::time_point> offered_at_{};
  std::atomic<unsigned> prompt_waits_{0};  // how many operations in a row were waited for in time
  std::vector<pollfd> fds_;                // driver of help

  mutable std::mutex mutex_;  // protects what follows
  std::deque<Submission> inbox_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_p2p_ = 0;
  std::uint64_t id_ = 0;
  std::vector<PeerIdentity> identities_;
  std::optional<DriverState> state_;  // as last asked for
  bool has_failed_ = false;
  Failure failure_;
  std::optional<Failure> requested_failure_;
  std::atomic<bool> inbox_filled_{false};
  std::atomic<bool> failure_requested_{false};
  std::atomic<bool> close_requested_{false};
  std::atomic<bool> state_requested_{false};
  std::atomic<bool> dead_{false};
  std::atomic<int> driver_pending_{0};  // operations the driver holds
};

}  // namespace holmes
