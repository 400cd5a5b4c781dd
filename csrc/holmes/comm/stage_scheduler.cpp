#include "holmes/comm/stage_scheduler.hpp"

#include <atomic>

namespace holmes {
namespace {

// `title`: of the operation it happened in; empty where the error names it.
Failure failure_of(const std::exception_ptr& error, const std::string& title) {
  Failure failure;
  try {
    std::rethrow_exception(error);
  } catch (const HolmesError& known) {
    failure = holmes::failure_of(known);
  } catch (const std::exception& other) {
    failure = {ErrorKind::system, other.what(), {}};
  }
  // One that a peer reported may say it already.
  if (!title.empty() && failure.message.find(title) == std::string::npos) failure.message += "; part of " + title;
  return failure;
}

}  // namespace

// The handle, and what is missing yet: its chains and its announcement.
struct StageScheduler::Operation {
  std::string title;
  WorkPtr work;
  std::atomic<std::size_t> missing{0};
  std::size_t running = 0;  // steps whose operations may still use the buffers; under the pipeline's mutex
};

struct StageScheduler::Task {
  Chain steps;
  std::shared_ptr<Operation> operation;
  std::uint64_t ticket = 0;
  std::size_t stage = 0;
};

WorkPtr StageScheduler::start(std::string title, const Step& announce, std::vector<Chain> chains, WorkPtr work) {
  auto operation = std::make_shared<Operation>();
  operation->title = std::move(title);
  operation->work = std::move(work);
  operation->missing = chains.size() + 1;
  operation->work->mark_running();
  std::vector<std::shared_ptr<Task>> tasks;
  std::vector<WorkPtr> announcement;
  {
    const std::lock_guard starting(starting_);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) throw_error(failure_->kind, failure_->message, failure_->context);
    }
    announcement = announce();
    const std::lock_guard lock(mutex_);
    pending_.insert(operation);
    ++operation->running;  // the announcement
    for (Chain& chain : chains)
      tasks.push_back(std::make_shared<Task>(Task{std::move(chain), operation, tickets_++, 0}));
  }
  for (const auto& task : tasks) enter(task);
  await(announcement, operation, "", [self = shared_from_this(), operation] { self->finish_part(operation); });
  return operation->work;
}

// The task waits for its turn in its stage; whoever is in the stage already runs what became ready meanwhile.
void StageScheduler::enter(const std::shared_ptr<Task>& task) {
  std::unique_lock lock(mutex_);
  if (failure_) return;
  Stage& stage = stages_[task->stage];
  stage.ready.emplace(task->ticket, task);
  if (stage.is_running) return;
  stage.is_running = true;
  while (!failure_ && !stage.ready.empty() && stage.ready.begin()->first == stage.next) {
    auto turn = std::move(stage.ready.begin()->second);
    stage.ready.erase(stage.ready.begin());
    ++stage.next;
    lock.unlock();
    run(turn);
    turn.reset();  // its buffers' owners may wait for locks of the caller (Python's)
    lock.lock();
  }
  stage.is_running = false;
}

void StageScheduler::run(const std::shared_ptr<Task>& task) {
  const auto& operation = task->operation;
  if (!begin_step(operation)) return;
  std::vector<WorkPtr> works;
  try {
    if (const Step step = std::move(task->steps[task->stage])) works = step();
  } catch (...) {
    fail(failure_of(std::current_exception(), operation->title));
  }
  await(works, operation, operation->title, [self = shared_from_this(), task] {
    if (++task->stage < stage_count) {
      self->enter(task);
    } else {
      self->finish_part(task->operation);
    }
  });
}

bool StageScheduler::begin_step(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  if (failure_) return false;
  ++operation->running;
  return true;
}

// Ends a begun step when all works are final: runs `then` where they succeeded; a failed one fails everything.
void StageScheduler::await(const std::vector<WorkPtr>& works, const std::shared_ptr<Operation>& operation,
                           const std::string& title, std::function<void()> then) {
  struct Join {
    std::atomic<std::size_t> missing;
    std::function<void()> then;
  };
  const std::shared_ptr<Join> join(new Join{works.size() + 1, std::move(then)});
  const auto arrive = [self = shared_from_this(), operation, join] {
    if (join->missing.fetch_sub(1) != 1) return;
    if (!self->has_failed()) join->then();
    self->end_step(operation);
  };
  for (const auto& work : works)
    work->on_final([self = shared_from_this(), arrive, work, title] {
      if (work->state() == WorkState::failed) self->fail(failure_of(work->error(), title));
      arrive();
    });
  arrive();
}

void StageScheduler::end_step(const std::shared_ptr<Operation>& operation) {
  std::optional<Failure> failure;
  {
    const std::lock_guard lock(mutex_);
    if (--operation->running > 0 || !failure_ || pending_.erase(operation) == 0) return;
    failure = failure_;
  }
  operation->work->fail(error_of(*failure));
}

void StageScheduler::finish_part(const std::shared_ptr<Operation>& operation) {
  if (operation->missing.fetch_sub(1) != 1) return;
  {
    const std::lock_guard lock(mutex_);
    pending_.erase(operation);
  }
  operation->work->complete();
}

void StageScheduler::fail(const Failure& failure) {
  // Buffers and callbacks are released outside the lock: their owners may do anything.
  std::vector<std::shared_ptr<Operation>> idle;
  std::array<std::map<std::uint64_t, std::shared_ptr<Task>>, stage_count> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    for (const auto& operation : pending_)
      if (operation->running == 0) idle.push_back(operation);
    for (const auto& operation : idle) pending_.erase(operation);
    for (std::size_t i = 0; i < stage_count; ++i) dropped[i].swap(stages_[i].ready);
  }
  on_failure_(failure);  // ends what runs; end_step does the rest
  for (const auto& operation : idle) operation->work->fail(error_of(failure));
}

bool StageScheduler::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

void StageScheduler::throw_if_failed(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (!failure_) return;
  throw_dead(name, *failure_);
}

bool StageScheduler::has_pending() const {
  const std::lock_guard lock(mutex_);
  return !pending_.empty();
}

}  // namespace holmes
