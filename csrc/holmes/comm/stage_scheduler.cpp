#include "holmes/comm/stage_scheduler.hpp"

#include <atomic>

#include "holmes/core/interrupt.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

// `title`: of the operation it happened in; empty where the error names it.
Failure failure_in(const std::exception_ptr& error, const std::string& title) {
  return failure_or(ErrorKind::system, [&] {
    Failure failure = holmes::failure_of(error);
    // One that a peer reported may say it already.
    if (!title.empty() && failure.message.find(title) == std::string::npos) failure.message += "; part of " + title;
    return failure;
  });
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

template <typename Action>
void StageScheduler::fail_where_it_throws(const std::string& title, const Action& action) {
  try {
    action();
  } catch (const std::exception&) {
    fail(failure_in(std::current_exception(), title));
  }
}

// Ends a begun step when all works are final: runs `then` where they succeeded; a failed one fails everything.
template <typename Then>
void StageScheduler::await(const std::vector<WorkPtr>& works, const std::shared_ptr<Operation>& operation,
                           const std::string& title, const Then& then) {
  struct Join {
    Join(std::size_t parts, const Then& next) : missing(parts), then(next) {}
    std::atomic<std::size_t> missing;
    Then then;
  };
  const auto join =
      made_or([&] { return std::make_shared<Join>(works.size() + 1, then); }, [] { return std::shared_ptr<Join>(); });
  if (!join) {
    fail(failure_in(std::make_exception_ptr(std::bad_alloc()), title));
    return end_step(operation);
  }
  const auto arrive = [self = shared_from_this(), operation, join] {
    if (join->missing.fetch_sub(1) != 1) return;
    if (!self->has_failed()) self->fail_where_it_throws(operation->title, join->then);
    self->end_step(operation);
  };
  for (const auto& work : works) {
    const auto is_awaited = [&] {
      work->on_final([self = shared_from_this(), arrive, work, title] {
        if (work->state() == WorkState::failed) self->fail(failure_in(work->error(), title));
        arrive();
      });
      return true;
    };
    if (made_or(is_awaited, [] { return false; })) continue;
    fail(failure_in(std::make_exception_ptr(std::bad_alloc()), title));
    arrive();
  }
  arrive();
}

WorkPtr StageScheduler::start(std::string title, const Step& announce, std::vector<Chain> chains, WorkPtr work) {
  auto operation = std::make_shared<Operation>();
  operation->title = std::move(title);
  operation->work = std::move(work);
  operation->missing = chains.size() + 1;
  operation->work->mark_running();
  // Once it is announced, nothing that takes memory is left to make.
  std::vector<std::shared_ptr<Task>> tasks;
  for (Chain& chain : chains) tasks.push_back(std::make_shared<Task>(Task{std::move(chain), operation}));
  std::vector<WorkPtr> announcement;
  {
    const std::lock_guard starting(starting_);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) throw_error(failure_->kind, failure_->message, failure_->context);
    }
    std::set<std::shared_ptr<Operation>> room{operation};
    announcement = announce();
    const std::lock_guard lock(mutex_);
    pending_.merge(room);
    ++operation->running;  // the announcement
    for (const auto& task : tasks) task->ticket = tickets_++;
  }
  for (const auto& task : tasks) fail_where_it_throws(operation->title, [&] { enter(task); });
  await(announcement, operation, "", [self = shared_from_this(), operation] { self->finish_part(operation); });
  return operation->work;
}

bool StageScheduler::run_alone(const std::string& title, const Step& announce, const Chain& chain, Work& work) {
  const std::unique_lock starting(starting_, std::try_to_lock);
  if (!starting || has_pending() || has_failed()) return false;
  work.mark_running();
  const auto end_with = [&](const std::string& part_of) {
    fail(failure_in(std::current_exception(), part_of));
    work.fail(made_or([&] { return error_of(*failure_); }, [] { return std::make_exception_ptr(std::bad_alloc()); }));
  };
  std::vector<WorkPtr> announcement;
  try {
    announcement = announce();
    for (const auto& part : announcement)
      part->on_final([self = shared_from_this(), part] {
        if (part->state() == WorkState::failed) self->fail(failure_in(part->error(), ""));
      });
  } catch (const Interrupted&) {
    throw;
  } catch (const UsageError&) {  // nothing was announced
    throw;
  } catch (const std::exception&) {
    end_with("");
    return true;
  }
  try {
    for (const Step& step : chain)
      if (step)
        for (const auto& part : step()) part->wait();
    for (const auto& part : announcement) part->wait();
    work.complete();
  } catch (const Interrupted&) {
    throw;
  } catch (const std::exception&) {
    end_with(title);
  }
  return true;
}

// The task waits for its turn in its stage; whoever is in the stage already runs what became ready meanwhile.
void StageScheduler::enter(const std::shared_ptr<Task>& task) {
  std::map<std::uint64_t, std::shared_ptr<Task>> room{{task->ticket, task}};
  std::unique_lock lock(mutex_);
  if (failure_) return;
  Stage& stage = stages_[task->stage];
  stage.ready.merge(room);
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
  fail_where_it_throws(operation->title, [&] {
    if (const Step step = std::move(task->steps[task->stage])) works = step();
  });
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

void StageScheduler::end_step(const std::shared_ptr<Operation>& operation) {
  {
    const std::lock_guard lock(mutex_);
    if (--operation->running > 0 || !failure_ || pending_.erase(operation) == 0) return;
  }
  operation->work->fail(error_of(*failure_));  // which stays as it is
}

void StageScheduler::finish_part(const std::shared_ptr<Operation>& operation) {
  if (operation->missing.fetch_sub(1) != 1) return;
  {
    const std::lock_guard lock(mutex_);
    pending_.erase(operation);
  }
  operation->work->complete();
}

void StageScheduler::fail(Failure failure) {
  // Buffers and callbacks are released outside the lock: their owners may do anything.
  std::set<std::shared_ptr<Operation>> idle;
  std::array<std::map<std::uint64_t, std::shared_ptr<Task>>, stage_count> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    for (auto next = pending_.begin(); next != pending_.end();) {
      const auto one = next++;
      if ((*one)->running == 0) idle.insert(pending_.extract(one));
    }
    for (std::size_t i = 0; i < stage_count; ++i) dropped[i].swap(stages_[i].ready);
  }
  on_failure_(*failure_);  // ends what runs; end_step does the rest
  for (const auto& operation : idle) operation->work->fail(error_of(*failure_));
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
