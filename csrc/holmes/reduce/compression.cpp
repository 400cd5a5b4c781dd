#include "holmes/reduce/compression.hpp"

#include <utility>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

std::shared_ptr<Compression>& of_this_thread() {
  thread_local std::shared_ptr<Compression> compression;
  return compression;
}

}  // namespace

void Compression::check_free() const {
  if (in_use_)
    throw UsageError(
        "a Compression with error feedback or differences is in use by an operation that is not finished; give each "
        "tensor its own and wait for the tensor's last operation");
}

void Compression::reset() {
  const std::lock_guard lock(mutex_);
  check_free();
  residual_.clear();
  reference_.clear();
  has_reference_ = false;
  count_ = 0;
}

Compression::Kept Compression::acquire(const std::shared_ptr<Compression>& compression, std::size_t count,
                                       std::size_t share, std::size_t reference_count,
                                       const std::shared_ptr<const void>& user) {
  Compression& self = *compression;
  const bool has_differences = self.settings_.differences && reference_count > 0;
  if (!self.settings_.error_feedback && !has_differences) return {};
  std::unique_lock lock(self.mutex_);
  self.check_free();
  if (self.count_ != 0 && self.count_ != count)
    throw UsageError("a Compression with error feedback or differences holds the rest of " +
                     std::to_string(self.count_) + " values, and the tensor now has " + std::to_string(count) +
                     "; give each tensor its own, or reset it on all ranks");
  const std::size_t kept_count = self.settings_.error_feedback ? share : 0;
  if (self.count_ != 0 &&
      (self.residual_.size() != kept_count || self.reference_.size() != (has_differences ? reference_count : 0)))
    throw UsageError("a Compression with error feedback or differences holds the rest of this rank's share of " +
                     std::to_string(self.residual_.size()) + " values, which now is one of " +
                     std::to_string(kept_count) + "; give each group and operation its own, or reset it on all ranks");
  self.residual_.resize(kept_count);
  Kept kept;
  if (has_differences) {
    self.reference_.resize(reference_count);
    kept.is_first = !self.has_reference_ || self.user_.lock() != user;
    if (kept.is_first) self.residual_.assign(self.residual_.size(), 0.0F);
    self.user_ = user;
    self.has_reference_ = false;  // until complete_reference: an operation that fails leaves half of it
  }
  self.count_ = count;
  self.in_use_ = true;
  lock.unlock();
  const std::shared_ptr<void> use(nullptr, [compression](void*) {
    const std::lock_guard release(compression->mutex_);
    compression->in_use_ = false;
  });
  if (self.settings_.error_feedback) kept.residual = {use, self.residual_.data()};
  if (has_differences) kept.reference = {use, self.reference_.data()};
  return kept;
}

void Compression::complete_reference() {
  const std::lock_guard lock(mutex_);
  has_reference_ = true;
}

std::shared_ptr<Compression> exchange_thread_compression(std::shared_ptr<Compression> compression) {
  return std::exchange(of_this_thread(), std::move(compression));
}

const std::shared_ptr<Compression>& thread_compression() { return of_this_thread(); }

}  // namespace holmes
