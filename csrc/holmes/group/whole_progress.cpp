#include "holmes/group/whole_progress.hpp"

#include <algorithm>

namespace holmes {

std::uint64_t WholeProgress::enter() {
  const std::lock_guard lock(mutex_);
  return entered_++;
}

void WholeProgress::end() {
  const std::lock_guard lock(mutex_);
  ++ended_;
}

void WholeProgress::withdraw() {
  const std::lock_guard lock(mutex_);
  --entered_;
}

WholeState WholeProgress::state() const {
  const std::lock_guard lock(mutex_);
  return {entered_, ended_, steps_.load(std::memory_order_relaxed) > 0};
}

void WholeProgress::ask(const WholeQuestion& question, Clock::time_point now) {
  const auto until = now + std::min(question.lease, longest_lease);
  {
    const std::lock_guard lock(mutex_);
    // One about a later operation holds for who waits in an earlier one.
    const bool is_open = now < asked_until_;
    if (is_open && question.operation < asked_.operation) return;
    if (is_open && question.operation == asked_.operation && until <= asked_until_) return;
    asked_ = question;
    asked_until_ = until;
  }
  for (const auto& part : parts()) part->wake();
}

std::optional<WholeQuestion> WholeProgress::asked_in(std::uint64_t operation, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  const auto left = std::chrono::floor<std::chrono::milliseconds>(asked_until_ - now);
  if (left.count() <= 0 || operation > asked_.operation) return std::nullopt;
  return WholeQuestion{operation, asked_.late, left};
}

void WholeProgress::join(const std::weak_ptr<WholePart>& part) {
  const std::lock_guard lock(mutex_);
  parts_.push_back(part);
}

void WholeProgress::hear() const {
  for (const auto& part : parts()) part->hear();
}

// None of them ends under the lock.
std::vector<std::shared_ptr<WholePart>> WholeProgress::parts() const {
  std::vector<std::shared_ptr<WholePart>> all;
  const std::lock_guard lock(mutex_);
  for (const auto& part : parts_)
    if (auto known = part.lock()) all.push_back(std::move(known));
  return all;
}

}  // namespace holmes
