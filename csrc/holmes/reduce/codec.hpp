// Codec: float32 in fewer bits, as bfloat16 or as integers of 8 or 4 bits with a scale for each block, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace holmes {

// Values are part of the wire protocol (Form). A block has `code_block` values, the last one what is left. A block of
// integers that holds an infinity or a NaN becomes NaN.
enum class Codec : std::uint8_t {
  bf16 = 2,  // rounded to nearest even: relative error up to 2^-9; half the bytes
  int8 = 3,  // absolute error up to 1/254 of the largest magnitude in its block; about a quarter of the bytes
  int4 = 5,  // absolute error up to 1/14 of it; about an eighth
  // The same of a block that was rotated (a Hadamard matrix times signs), so that one large value does not make the
  // steps of all others large: the error is spread evenly over the block. What is shorter than a block is not rotated.
  int8_rotated = 6,
  int4_rotated = 7,
};
inline constexpr std::size_t code_block = 256;

constexpr bool is_rotated(Codec codec) { return codec == Codec::int8_rotated || codec == Codec::int4_rotated; }
// "bf16", "int8" or "int4".
std::string_view name(Codec codec);
// Throws UsageError where there is none of this name, or bf16 is to be rotated.
Codec codec_from_name(std::string_view name, bool rotation);

// Bytes that `count` values take.
std::size_t encoded_bytes(Codec codec, std::size_t count);

// Encodes values[i], or values[i] + residual[i] where `residual` is not null; `residual` then becomes what the code
// lost (0 where that is not finite). No overlap; any alignment of `encoded`.
void encode(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* residual);

// values[i] = the decoded value, or values[i] + it where `add`.
void decode(Codec codec, const std::byte* encoded, std::size_t count, float* values, bool add);

}  // namespace holmes
