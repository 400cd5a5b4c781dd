#include "holmes/comm/compression.hpp"

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

Codec codec_from_name(const std::string& name) {
  if (name == "bf16") return Codec::bf16;
  if (name == "int8") return Codec::int8;
  throw UsageError("compression '" + name + "' does not exist; use one of: bf16, int8");
}

}  // namespace

Compression::Compression(const std::string& codec, bool error_feedback)
    : codec_(codec_from_name(codec)), error_feedback_(error_feedback) {}

void Compression::check_free() const {
  if (in_use_)
    throw UsageError(
        "a Compression with error feedback is in use by an operation that is not finished; give each tensor its own "
        "and wait for the tensor's last operation");
}

void Compression::reset() {
  const std::lock_guard lock(mutex_);
  check_free();
  residual_.clear();
}

float* Compression::acquire(std::size_t count) {
  if (!error_feedback_) return nullptr;
  const std::lock_guard lock(mutex_);
  check_free();
  if (!residual_.empty() && residual_.size() != count)
    throw UsageError("a Compression with error feedback holds the rest of " + std::to_string(residual_.size()) +
                     " values, and this rank's share of the tensor now has " + std::to_string(count) +
                     "; give each tensor its own, or reset it");
  residual_.resize(count);
  in_use_ = true;
  return residual_.data();
}

void Compression::release() {
  const std::lock_guard lock(mutex_);
  in_use_ = false;
}

}  // namespace holmes
