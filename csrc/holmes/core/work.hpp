// Work: the handle of an asynchronous operation.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "holmes/core/clock.hpp"

namespace holmes {

// State of a Work. It only moves forward; the last two are final.
enum class WorkState : int {
  queued = 0,     // accepted, an earlier operation of the communicator still runs
  running = 1,    // bytes are moving
  completed = 2,  // done; the buffers hold the result
  failed = 3,     // done; every wait raises the error, the buffers' contents are undefined
};

std::string_view name(WorkState state);

// One asynchronous operation. It holds the operation's buffers until it is final.
// Thread-safe: any thread may query and wait.
class Work {
public:
  // `submitted`: when it was called.
  explicit Work(Clock::time_point submitted = Clock::now()) : submitted_(submitted) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  WorkState state() const { return state_.load(std::memory_order_acquire); }
  bool is_final() const { return state() >= WorkState::completed; }

  // Blocks the calling thread until the work is final. A failed work always throws its error; where `timeout`
  // passes first, throws TimeoutError and leaves the work running (its buffers stay in use). Where a signal's handler
  // raises, the work is abandoned and that thrown (Interrupted).
  virtual void wait(std::optional<Duration> timeout = std::nullopt);
  // Device memory: what is put on `stream` (a CUstream) from now on runs after the work; does not block the calling
  // thread. Throws where the work has failed. Host memory: as wait.
  virtual void wait_stream([[maybe_unused]] void* stream) { wait(); }
  // As wait_stream, on the stream that the operation was called on; how a synchronous call ends.
  virtual void join() { wait(); }
  // As wait, but a failed work throws nothing. `timeout` counts from `since`.
  void await_final(std::optional<Duration> timeout, Clock::time_point since);
  void await_final() { await_final(std::nullopt, {}); }
  // The error of a failed work, else null.
  std::exception_ptr error() const;
  // Rank the message of a recv (also from any source) came from; -1 for other operations and before the end.
  int source_rank() const { return source_rank_.load(std::memory_order_acquire); }
  // Time from submission to the final state (to now where it is not final yet).
  Duration elapsed() const;
  // Whether a thread waits for it, or has waited and given up.
  bool is_awaited() const { return is_awaited_.load(std::memory_order_relaxed); }
  void mark_awaited() { is_awaited_.store(true, std::memory_order_relaxed); }
  // When it was called.
  Clock::time_point submitted() const { return submitted_; }
  // Runs `callback` once when the work is final: now where it already is, else in the thread that finishes it.
  // It must not block.
  void on_final(std::function<void()> callback);

  // --- for the engine ---
  void mark_running();
  void complete(Clock::time_point now = Clock::now());
  void fail(std::exception_ptr error, Clock::time_point now = Clock::now());
  void set_source_rank(int rank) { source_rank_.store(rank, std::memory_order_release); }

protected:
  // For a thread that waits for it, now and then: runs handlers of signals (see Interrupted).
  void look_for_signals();

private:
  // Fails it soon, and what it belongs to: nobody waits any more, and its buffers are let go of.
  virtual void abandon([[maybe_unused]] const std::string& reason) {}
  // Whether it is final; false where `until` passes first.
  bool await_final_until(std::optional<Clock::time_point> until);
  void finish(WorkState state, std::exception_ptr error, Clock::time_point now);

  std::atomic<WorkState> state_{WorkState::queued};
  std::atomic<int> source_rank_{-1};
  std::atomic<bool> is_awaited_{false};
  mutable std::mutex mutex_;
  std::condition_variable final_;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
  const Clock::time_point submitted_;
  std::optional<Clock::time_point> finished_;
};

// A completed work of a message from `source`, or of anything else (-1): one for the whole process, which is never let
// go of, so that handles of it need not be counted (an atomic operation for each copy).
std::shared_ptr<Work> completed_work(int source);

// Of one call that a signal's handler has interrupted: its works end soon (one was abandoned, and with it what it
// belongs to), and their memory is the caller's then. A failed one throws nothing.
void await_all_final(std::span<const std::shared_ptr<Work>> works);

}  // namespace holmes
