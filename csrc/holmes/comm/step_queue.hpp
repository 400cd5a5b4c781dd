// StepQueue: runs operations that are made of steps on several communicators, one operation after the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "holmes/comm/communicator.hpp"
#include "holmes/core/error.hpp"

namespace holmes {

// The steps of an operation. Each submits operations and appends them to `works`; the next one runs when they are
// final.
struct StepList {
  using Step = std::function<void(StepList&)>;

  std::deque<Step> steps{};
  std::vector<WorkPtr> works{};
  std::size_t added = 0;  // by the step that runs: they come first
  // The thread that called the operation runs the steps: a step of one operation may be synchronous.
  bool is_here = false;

  // For a step: what is to run before all that were to come, in the order in which it is added.
  void add_next(Step step) { steps.insert(steps.begin() + static_cast<std::ptrdiff_t>(added++), std::move(step)); }
  void add_next(StepList inner) {
    for (Step& step : inner.steps) add_next(std::move(step));
  }
};

// All ranks that start the same operations in the same order call the communicators below in one order too. The first
// failure ends everything, also where memory is short; an operation is final when no operation of its steps runs any
// more. Thread-safe.
class StepQueue : public std::enable_shared_from_this<StepQueue> {
public:
  // `on_failure` hears of the first failure, once; it must not block.
  explicit StepQueue(std::function<void(const Failure&)> on_failure) : on_failure_(std::move(on_failure)) {}

  // Where `is_sync`, `work` is final on return, and the calling thread runs the steps if nothing else is under way;
  // what a signal's handler raises meanwhile ends everything and is thrown. Throws what ended the queue.
  void start(StepList list, const WorkPtr& work, bool is_sync);

  // Ends everything: pending and later operations raise `failure`.
  void fail(Failure failure);
  std::optional<Failure> failure() const;
  // Throws what ended it, for the communicator of this name.
  void throw_if_failed(const std::string& name) const;
  std::size_t pending() const;

private:
  struct Operation {
    StepList list;
    WorkPtr work;
    std::atomic<std::size_t> missing{0};  // works of the step under way
  };
  using OperationPtr = std::shared_ptr<Operation>;

  void run(OperationPtr operation);
  void run_here(const OperationPtr& operation);
  // Takes the next step and runs it.
  void step(Operation& operation);
  template <typename Action>
  void fail_where_it_throws(const Action& action);
  bool goes_on(const Operation& operation) const;
  // Whether all works of the step are final already; else who finishes the last one runs the next step.
  bool is_done(const OperationPtr& operation);
  // Ends the first operation; returns the one that is first then.
  OperationPtr end(const OperationPtr& operation);

  const std::function<void(const Failure&)> on_failure_;
  mutable std::mutex mutex_;
  std::list<OperationPtr> queue_;   // the front one runs
  std::optional<Failure> failure_;  // stays as it is
};

}  // namespace holmes
