#include "holmes/comm/step_queue.hpp"

#include "holmes/core/interrupt.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

// A step calls a row, or at most two columns.
constexpr std::size_t most_works = 2;

}  // namespace

template <typename Action>
void StepQueue::fail_where_it_throws(const Action& action) {
  try {
    action();
  } catch (const std::exception&) {
    fail(failure_of(std::current_exception()));
  }
}

void StepQueue::start(StepList list, const WorkPtr& work, bool is_sync) {
  const auto operation = std::make_shared<Operation>();
  operation->list = std::move(list);
  operation->list.works.reserve(most_works);  // what a step has started is never lost
  operation->work = work;
  std::list<OperationPtr> room{operation};
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) failure_->raise();
    is_first = queue_.empty();
    operation->list.is_here = is_sync && is_first;
    queue_.splice(queue_.end(), room);
  }
  if (operation->list.is_here)
    run_here(operation);
  else if (is_first)
    run(operation);
  if (is_sync) work->await_final();
}

bool StepQueue::goes_on(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  return !failure_ && !operation.list.steps.empty();
}

void StepQueue::step(Operation& operation) {
  operation.list.works.clear();
  operation.list.added = 0;
  const StepList::Step next = std::move(operation.list.steps.front());
  operation.list.steps.pop_front();
  next(operation.list);
}

void StepQueue::run(OperationPtr operation) {
  operation->work->mark_running();
  while (operation) {
    if (!goes_on(*operation)) {
      operation = end(operation);
      if (operation) operation->work->mark_running();
      continue;
    }
    fail_where_it_throws([&] { step(*operation); });
    if (!is_done(operation)) return;
  }
}

bool StepQueue::is_done(const OperationPtr& operation) {
  const std::vector<WorkPtr>& works = operation->list.works;
  operation->missing = works.size() + 1;
  for (const WorkPtr& work : works) {
    const auto is_awaited = [&] {
      work->on_final([self = shared_from_this(), operation, work] {
        if (work->state() == WorkState::failed) self->fail(failure_of(work->error()));
        if (operation->missing.fetch_sub(1) == 1) self->run(operation);
      });
      return true;
    };
    if (made_or(is_awaited, [] { return false; })) continue;
    fail(failure_of(std::make_exception_ptr(std::bad_alloc())));
    operation->missing.fetch_sub(1);
  }
  return operation->missing.fetch_sub(1) == 1;
}

void StepQueue::run_here(const OperationPtr& operation) {
  std::exception_ptr interrupted;
  const auto guarded = [&](const auto& action) {
    try {
      action();
    } catch (const Interrupted&) {
      interrupted = std::current_exception();
      fail(failure_of(interrupted));
    } catch (const std::exception&) {
      fail(failure_of(std::current_exception()));
    }
  };
  operation->work->mark_running();
  operation->work->mark_awaited();
  while (goes_on(*operation)) {
    guarded([&] { step(*operation); });
    for (const WorkPtr& work : operation->list.works) {
      while (!work->is_final()) guarded([&] { work->wait(); });  // which drives it
      if (work->state() == WorkState::failed) fail(failure_of(work->error()));
    }
  }
  if (const auto next = end(operation)) run(next);
  if (interrupted) std::rethrow_exception(interrupted);
}

StepQueue::OperationPtr StepQueue::end(const OperationPtr& operation) {
  OperationPtr next;
  bool has_failed = false;
  {
    const std::lock_guard lock(mutex_);
    has_failed = failure_.has_value();
    std::erase(queue_, operation);
    if (!has_failed && !queue_.empty()) next = queue_.front();
  }
  operation->list.steps.clear();  // buffers' owners may do anything: not under the lock
  operation->list.works.clear();
  if (has_failed)
    operation->work->fail(error_of(*failure_));
  else
    operation->work->complete();
  return next;
}

void StepQueue::fail(Failure failure) {
  std::list<OperationPtr> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    if (!queue_.empty()) waiting.splice(waiting.end(), queue_, std::next(queue_.begin()), queue_.end());
    // who runs the first one ends it
  }
  on_failure_(*failure_);
  for (const auto& operation : waiting) operation->work->fail(error_of(*failure_));
}

std::optional<Failure> StepQueue::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void StepQueue::throw_if_failed(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw_dead(name, *failure_);
}

std::size_t StepQueue::pending() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

}  // namespace holmes
