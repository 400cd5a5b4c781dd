// StageScheduler: runs operations that are made of asynchronous operations of several communicators.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "holmes/comm/communicator.hpp"
#include "holmes/core/error.hpp"

namespace holmes {

// A chain has one step for each stage. A step submits operations, which must be asynchronous, and returns them; the
// next one runs when they are final. An absent step does nothing.
using Step = std::function<std::vector<WorkPtr>()>;
constexpr std::size_t stage_count = 4;
using Chain = std::array<Step, stage_count>;

// In each stage the steps of all chains run in the order in which the chains were started, whatever came to an end
// first: where each stage has communicators of its own, the ranks' calls on them match. Chains overlap: while one is in
// a late stage, the next ones are in earlier stages. The first failure ends everything; an operation is final when none
// of its steps' operations runs any more. Thread-safe.
class StageScheduler : public std::enable_shared_from_this<StageScheduler> {
public:
  // `on_failure` hears of the first failure, once; it must not block.
  explicit StageScheduler(std::function<void(const Failure&)> on_failure) : on_failure_(std::move(on_failure)) {}

  // Starts an operation; it is final when what `announce` submits and all chains are. `announce` runs first, for
  // several threads in the order of their chains; what it throws leaves everything as it was. `title` says in the
  // errors of the chains what they are parts of, `work` is its handle. Throws what ended the pipeline.
  WorkPtr start(std::string title, const Step& announce, std::vector<Chain> chains,
                WorkPtr work = std::make_shared<Work>());
  // The same in the calling thread, from the announcement to the end, of one chain, whose steps' operations may be
  // synchronous. Returns false, having done nothing, where something else is under way. Throws also Interrupted, and
  // then the caller is to end everything.
  bool run_alone(const std::string& title, const Step& announce, const Chain& chain, Work& work);

  // Ends everything, also where memory is short: pending and later operations raise `failure`.
  void fail(Failure failure);
  bool has_failed() const;
  // Throws what ended it, for the communicator of this name.
  void throw_if_failed(const std::string& name) const;
  bool has_pending() const;

private:
  struct Operation;
  struct Task;  // a chain under way
  struct Stage {
    std::uint64_t next = 0;  // ticket whose turn it is
    std::map<std::uint64_t, std::shared_ptr<Task>> ready;
    bool is_running = false;  // a thread runs steps of this stage
  };

  void enter(const std::shared_ptr<Task>& task);
  void run(const std::shared_ptr<Task>& task);
  // With what `action` throws.
  template <typename Action>
  void fail_where_it_throws(const std::string& title, const Action& action);
  bool begin_step(const std::shared_ptr<Operation>& operation);
  template <typename Then>
  void await(const std::vector<WorkPtr>& works, const std::shared_ptr<Operation>& operation, const std::string& title,
             const Then& then);
  void end_step(const std::shared_ptr<Operation>& operation);
  void finish_part(const std::shared_ptr<Operation>& operation);

  const std::function<void(const Failure&)> on_failure_;
  std::mutex starting_;  // held from an operation's announcement until its tickets are drawn, or it has run alone
  mutable std::mutex mutex_;
  std::array<Stage, stage_count> stages_;
  std::uint64_t tickets_ = 0;
  std::set<std::shared_ptr<Operation>> pending_;
  std::optional<Failure> failure_;
};

}  // namespace holmes
