// Compression of float32: Codec, as bfloat16 or as 8-bit integers with a scale for each block, and back; and what it
// left out of a tensor so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace holmes {

// Values are part of the wire protocol.
enum class Codec : std::uint8_t {
  bf16 = 2,  // rounded to nearest even: relative error up to 2^-9; half the bytes
  int8 = 3,  // per block of int8_block values one scale, the block's largest magnitude / 127: absolute error up to half
             // a scale; about a quarter of the bytes. A block that holds an infinity or a NaN becomes NaN.
};
inline constexpr std::size_t int8_block = 256;

// Bytes that `count` values take.
std::size_t encoded_bytes(Codec codec, std::size_t count);

// Encodes values[i], or values[i] + residual[i] where `residual` is not null; `residual` then becomes what the code
// lost (0 where that is not finite). No overlap; any alignment of `encoded`.
void encode(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* residual);

// values[i] = the decoded value, or values[i] + it where `add`.
void decode(Codec codec, const std::byte* encoded, std::size_t count, float* values, bool add);

// How the hop between clusters of an all_reduce is compressed, and what that left out so far.
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
