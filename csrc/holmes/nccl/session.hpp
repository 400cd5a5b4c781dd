// Session: one ncclComm_t, its stream and what runs on it: set-up with a deadline, one operation after the other, an
// end that never hangs.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "holmes/core/failure.hpp"
#include "holmes/core/types.hpp"
#include "holmes/nccl/api.hpp"
#include "holmes/nccl/nccl_work.hpp"
#include "holmes/nccl/session_record.hpp"

namespace holmes::nccl {

struct SessionOptions {
  std::string name;  // in errors
  std::string host;
  int rank = 0;
  int size = 1;
  std::string net;  // netName
  // Whether this NCCL runs operations of several of its communicators on a device in the order of the calls.
  bool library_orders = false;
};

struct Operation {
  const char* name = "";
  std::vector<Buffer> buffers;  // held until it is final; it begins behind what their streams have now
  Duration timeout{};
  std::function<Result(Comm comm, Stream stream)> enqueue;
  // Runs on the first buffer's stream itself: no other stream has to wait for it, or it for them.
  bool on_callers_stream = false;
  std::shared_ptr<NcclWork> work{};  // absent: made by run
};

// Thread-safe.
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

  // Puts the calls that `enqueue` makes on the device, as one group. Throws the failure of a dead session; UsageError
  // where NCCL refuses the arguments.
  std::shared_ptr<NcclWork> run(Operation operation);
  // A call that is no operation, under the same lock.
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
  // Watchdog: finishes what has ended, looks for errors. Returns whether something is pending.
  bool poll();

private:
  struct Pending {
    std::shared_ptr<NcclWork> work;
    std::vector<Buffer> buffers;
    Clock::time_point deadline;
    const char* name;
    std::uint64_t number;
    std::uint64_t record;  // its number in the record
  };

  Result wait_while_in_progress(const char* what, Result result, Clock::time_point deadline);
  [[noreturn]] void fail_and_throw(ErrorKind kind, const std::string& message);
  Config config() const;
  void begin_behind(const Operation& operation, cuda::Stream stream) const;
  void keep_order(cuda::Stream stream, const std::optional<unsigned long long>& capture) const;
  void check_async_error();
  // By force, in a thread of its own; `buffers` are what NCCL may still write to.
  void abort_in_background(std::deque<Pending> pending);
  std::string place() const;

  const Api& api_;
  cuda::Device& device_;
  SessionOptions options_;
  std::shared_ptr<SessionRecord> record_;
  cuda::Stream stream_ = nullptr;
  std::atomic<Comm> comm_{nullptr};  // changed under device_.issue
  std::uint64_t sequence_ = 0;       // under device_.issue
  cuda::Device::Last last_;          // operation of this communicator; under device_.issue
  cuda::Device::Last last_captured_;

  std::atomic<bool> dead_{false};  // failed, NCCL's communicator is being aborted
  std::atomic<bool> left_{false};  // a peer has left
  mutable std::mutex mutex_;       // protects what follows
  Failure failure_;
  std::deque<Pending> pending_;
  Clock::time_point end_expected_{};  // where a peer has left
  Clock::time_point next_error_check_{};
};

}  // namespace holmes::nccl
