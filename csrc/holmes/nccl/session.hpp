// Session: one ncclComm_t, its stream and what runs on it: set-up with a deadline, one operation after the other, an
// end that never hangs.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "holmes/core/error.hpp"
#include "holmes/core/types.hpp"
#include "holmes/nccl/api.hpp"
#include "holmes/nccl/nccl_work.hpp"
#include "holmes/nccl/net_plugin.hpp"
#include "holmes/nccl/session_record.hpp"
#include "holmes/nccl/settings.hpp"

namespace holmes::nccl {

struct SessionOptions {
  std::string name;  // in errors
  std::string host;
  int rank = 0;
  int size = 1;
  std::string net;  // netName; empty: NCCL's choice
  Settings settings{};
  const NetPlugin* plugin = nullptr;      // what carries it, where NCCL itself does not
  std::vector<std::string> interfaces{};  // of the plugin
};

struct Operation {
  const char* name = "";
  std::vector<Buffer> buffers;  // it begins behind what their streams have now
  Duration timeout{};
  std::function<Result(Comm comm, Stream stream)> enqueue;
  // Runs on the first buffer's stream itself: no other stream has to wait for it, or it for them.
  bool on_callers_stream = false;
  // Whether `enqueue` makes one call, which needs no group around it.
  bool is_one_call = false;
  // Whether the buffers are held until it is final, or in a CUDA graph until the caller's stream waits for it.
  bool holds_buffers = true;
  // Whether they are held no longer than until the caller's stream waits for it: what is freed then has no other owner
  // before that stream gets there.
  bool frees_in_stream_order = false;
  std::shared_ptr<NcclWork> work{};  // absent: made by run
};

// NCCL's communicator is a blocking one: its calls return once the operation is on the device, which takes long only
// where peers have to be connected first. A thread that is inside NCCL then is freed by the watchdog, at the deadline
// or where the session fails. Thread-safe.
class Session : public std::enable_shared_from_this<Session> {
public:
  Session(const Api& api, cuda::Device& device, SessionOptions options);
  // Ends NCCL's communicator: in order where nothing is pending and nothing failed, else by force.
  ~Session();

  // Collective: all ranks with rank 0's `id`. Throws TimeoutError at `deadline`, CommunicatorError with NCCL's text.
  void connect(const UniqueId& id, Clock::time_point deadline);

  // As connect, by NCCL from `parent`'s communicator without the ranks of `excluded` (2.27 and later). Collective over
  // the others. Returns NCCL's text where it fails on this rank, empty: done. Throws TimeoutError.
  std::string connect_shrunk(Session& parent, std::vector<int> excluded, Clock::time_point deadline);

  // As connect_shrunk, of `parent`'s ranks of the same `color`, in the order of `key`; -1: of none of them. Collective
  // over all ranks of `parent`.
  std::string connect_split(Session& parent, int color, int key, Clock::time_point deadline);

  // Puts the calls that `enqueue` makes on the device, as one group. Throws the failure of a dead session; UsageError
  // where NCCL refuses the arguments.
  std::shared_ptr<NcclWork> run(Operation operation);
  // A call that is no operation, in turn with them.
  void call(const char* what, const std::function<Result(Comm comm)>& function);

  const Api& api() const { return api_; }
  bool has_pending() const;
  // Of its operations; never null.
  const std::shared_ptr<SessionRecord>& record() const { return record_; }
  // Everything pending and later fails with this; NCCL's communicator is aborted in the background. Never blocks; the
  // first failure counts.
  void fail(const Failure& failure);
  // A peer has left: nothing new can begin, what is pending has some seconds to end (the peer's part may be done).
  void expect_end(const Failure& failure);
  bool is_dead() const { return dead_.load(std::memory_order_acquire) || left_.load(std::memory_order_acquire); }
  // Whether NCCL's communicator is gone or about to be; one that a peer has only left is not.
  bool has_failed() const { return dead_.load(std::memory_order_acquire); }
  void throw_if_dead() const;
  // Watchdog: finishes what has ended, looks for errors. Returns when to call it again; absent: nothing is pending.
  std::optional<Clock::time_point> poll();

private:
  struct Pending {
    std::shared_ptr<NcclWork> work;  // not on the device while its call is inside NCCL
    std::vector<Buffer> buffers;
    Clock::time_point deadline;
    const char* name;
    std::uint64_t number;
    std::uint64_t record;  // its number in the record
    bool frees_in_stream_order;
  };

  // A call of NCCL that returns when all ranks take part, and the communicator that it makes.
  using Make = std::function<Result(Comm* made, Config* config)>;
  // Calls it in a thread of its own. One that is not back at the deadline is left behind, and ends what it makes.
  Result make_comm(const char* what, Make make, Clock::time_point deadline);
  // Waits until no other thread is inside NCCL with this communicator.
  std::unique_lock<std::timed_mutex> enter(const char* what, Clock::time_point deadline);
  // Finishes what has ended of what is pending.
  void finish_ended();
  // Takes back what is pending; absent where the session has failed since.
  std::optional<Pending> take_back(const std::shared_ptr<NcclWork>& work);
  // Lets go of what this operation holds: its buffers' stream is behind it now.
  void release_buffers(const NcclWork* work);
  // Lets go of what operations up to this one hold for the graph, and of what captures that have ended do.
  void release_captured(std::uint64_t number, std::optional<unsigned long long> living_capture);
  [[noreturn]] void fail_and_throw(ErrorKind kind, const std::string& message);
  Result enqueue_group(const Operation& operation, Comm comm, Stream stream) const;
  void begin_behind(const std::vector<Buffer>& buffers, cuda::Stream stream) const;
  void check_async_error();
  // By force, in a thread of its own; NCCL may still write to the buffers of `pending`.
  void abort_in_background(std::deque<Pending> pending);
  std::string place() const;

  const Api& api_;
  cuda::Device& device_;
  SessionOptions options_;
  std::shared_ptr<SessionRecord> record_;
  cuda::Stream stream_ = nullptr;
  // Held by the one thread that is inside NCCL with this communicator. No other communicator waits for it.
  // What is split from it and shares with it is one communicator to NCCL.
  std::shared_ptr<std::timed_mutex> inside_ = std::make_shared<std::timed_mutex>();
  std::atomic<Comm> comm_{nullptr};
  std::uint64_t sequence_ = 0;  // under inside_

  std::atomic<bool> dead_{false};  // failed, NCCL's communicator is being aborted
  std::atomic<bool> left_{false};  // a peer has left
  mutable std::mutex mutex_;       // protects what follows
  Failure failure_;
  std::deque<Pending> pending_;
  // What operations of a capture on stream_ use, until the caller's stream has waited for them.
  struct Captured {
    std::uint64_t number;
    unsigned long long capture_id;
    std::vector<Buffer> buffers;
  };
  std::deque<Captured> captured_;
  Clock::time_point end_expected_{};               // where a peer has left
  std::optional<Clock::time_point> error_seen_{};  // the watchdog's: since when NCCL reports one
};

}  // namespace holmes::nccl
