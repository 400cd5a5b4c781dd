// Compression: how the hop between clusters of an all_reduce is compressed, and what that left out so far.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "holmes/reduce/codec.hpp"

namespace holmes {

// One object for each tensor where error feedback is on: it keeps what the code lost of this rank's share and adds it
// the next time, so that errors do not add up over steps. Without, one object serves all. Thread-safe, but with error
// feedback only one operation at a time may use it.
class Compression {
public:
  // `codec` is "bf16" or "int8". Throws UsageError for any other name.
  Compression(const std::string& codec, bool error_feedback);

  Codec codec() const { return codec_; }
  const char* codec_name() const { return codec_ == Codec::bf16 ? "bf16" : "int8"; }
  bool has_error_feedback() const { return error_feedback_; }
  // Forgets what was left out. Throws UsageError while an operation uses it.
  void reset();

  // --- for the communicator ---
  // Where an operation keeps what it leaves out of `count` values: null without error feedback. Throws UsageError where
  // another operation has it or the count has changed.
  float* acquire(std::size_t count);
  void release();

private:
  void check_free() const;

  const Codec codec_;
  const bool error_feedback_;
  std::mutex mutex_;
  std::vector<float> residual_;
  bool in_use_ = false;
};

}  // namespace holmes
