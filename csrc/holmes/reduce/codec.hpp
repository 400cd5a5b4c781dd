// Codec: float32 as bfloat16 or as 8-bit integers with a scale for each block, and back.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace holmes
