#include "holmes/comm/step_queue.hpp"

#include <atomic>

#include "holmes/core/interrupt.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

Failure failure_of(const std::exception_ptr& error) {
  return failure_or(ErrorKind::system, [&]() -> Failure {
    try {
      std::rethrow_exception(error);
    } catch (const HolmesError& known) {
      return holmes::failure_of(known);
    } catch (const Interrupted& interrupted) {
      return {ErrorKind::aborted, std::string("it was interrupted by ") + interrupted.what(), {}};
    } catch (const std::exception& other) {
      return {ErrorKind::system, other.what(), {}};
    }
  });
}

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
  const auto operation = std::make_shared<Operation>(Operation{std::move(list), work});
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) failure_->raise();
    is_first = queue_.empty();
    operation->list.is_here = is_sync && is_first;
    queue_.push_back(operation);
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
    const std::vector<WorkPtr> works = operation->list.works;
    if (works.empty()) continue;
    const auto missing = std::make_shared<std::atomic<std::size_t>>(works.size() + 1);
    for (const WorkPtr& work : works)
      work->on_final([self = shared_from_this(), operation, missing, work] {
        if (work->state() == WorkState::failed) self->fail(failure_of(work->error()));
        if (missing->fetch_sub(1) == 1) self->run(operation);
      });
    if (missing->fetch_sub(1) != 1) return;  // who finishes the last one goes on
  }
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
  std::optional<Failure> failure;
  {
    const std::lock_guard lock(mutex_);
    failure = failure_;
    std::erase(queue_, operation);
    if (!failure && !queue_.empty()) next = queue_.front();
  }
  operation->list.steps.clear();  // buffers' owners may do anything: not under the lock
  operation->list.works.clear();
  if (failure)
    operation->work->fail(error_of(*failure));
  else
    operation->work->complete();
  return next;
}

void StepQueue::fail(Failure failure) {
  std::vector<OperationPtr> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    while (queue_.size() > 1) {  // who runs the first one ends it
      waiting.push_back(std::move(queue_.back()));
      queue_.pop_back();
    }
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
