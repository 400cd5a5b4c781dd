// Plain loops over blocks that the compiler vectorises: a core encodes and decodes faster than the slow links carry.
#include "holmes/reduce/codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::size_t block = code_block;
constexpr std::int32_t magnitude_mask = 0x7fffffff;
constexpr std::int32_t infinity_bits = 0x7f800000;
// Adding and subtracting it rounds a float of small magnitude to the nearest whole number, ties to even.
constexpr float round_to_whole = 12582912.0F;  // 1.5 * 2^23

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<std::uint16_t>((bits & magnitude_mask) > infinity_bits ? nan : rounded);
}

float from_bf16(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

// `decoded` may be null.
void encode_bf16(const float* values, std::size_t count, std::byte* encoded, float* decoded) {
  std::uint16_t halves[block];
  for (std::size_t i = 0; i < count; ++i) halves[i] = to_bf16(values[i]);
  std::memcpy(encoded, halves, count * sizeof(std::uint16_t));
  if (decoded == nullptr) return;
  for (std::size_t i = 0; i < count; ++i) decoded[i] = from_bf16(halves[i]);
}

void decode_bf16(const std::byte* encoded, std::size_t count, float* decoded) {
  std::uint16_t halves[block];
  std::memcpy(halves, encoded, count * sizeof(std::uint16_t));
  for (std::size_t i = 0; i < count; ++i) decoded[i] = from_bf16(halves[i]);
}

// --- integers of 8 and 4 bits ---

constexpr bool is_int4(Codec codec) { return codec == Codec::int4 || codec == Codec::int4_rotated; }
constexpr std::size_t code_bytes(Codec codec, std::size_t count) { return is_int4(codec) ? (count + 1) / 2 : count; }

// Of a square of 16 x 16 values: H X H, transposed, H the Hadamard matrix. Twice, it is 256 X.
void rotate(float* values) {
  constexpr std::size_t side = 16;
  static_assert(side * side == block);
  float turned[block];
  const auto along_columns = [](float* square) {
    for (std::size_t half = 1; half < side; half *= 2)
      for (std::size_t row = 0; row < side; row += 2 * half)
        for (std::size_t pair = row; pair < row + half; ++pair)
          for (std::size_t column = 0; column < side; ++column) {
            float& upper = square[pair * side + column];
            float& lower = square[(pair + half) * side + column];
            const float sum = upper + lower;
            lower = upper - lower;
            upper = sum;
          }
  };
  along_columns(values);
  for (std::size_t row = 0; row < side; ++row)
    for (std::size_t column = 0; column < side; ++column) turned[column * side + row] = values[row * side + column];
  along_columns(turned);
  std::memcpy(values, turned, sizeof turned);
}

// Fixed signs, without which a block of equal values would become one large value. The bits of SHA-256's constants,
// which stand for no pattern.
constexpr std::uint32_t sign_bits[block / 32] = {0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5,
                                                 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5};

void change_signs(float* values) {
  for (std::size_t i = 0; i < block; ++i) {
    const std::uint32_t sign = (sign_bits[i / 32] >> (i % 32)) << 31;
    values[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(values[i]) ^ sign);
  }
}

constexpr float rotation_norm = 1.0F / 16;  // of a block, the root of its length

void decode_integers(Codec codec, const std::byte* encoded, std::size_t count, float* decoded) {
  float scale;
  std::memcpy(&scale, encoded, sizeof scale);
  encoded += sizeof scale;
  if (is_int4(codec)) {
    std::uint8_t pairs[block / 2];
    std::memcpy(pairs, encoded, code_bytes(codec, count));
    // In halves: the first half of the values is in the lower bits.
    const std::size_t half = code_bytes(codec, count);
    for (std::size_t i = 0; i < half; ++i) decoded[i] = scale * static_cast<float>((pairs[i] & 15) - 8);
    for (std::size_t i = half; i < count; ++i) decoded[i] = scale * static_cast<float>((pairs[i - half] >> 4) - 8);
  } else {
    std::int8_t codes[block];
    std::memcpy(codes, encoded, count);
    for (std::size_t i = 0; i < count; ++i) decoded[i] = scale * static_cast<float>(codes[i]);
  }
  if (!is_rotated(codec) || count < block) return;
  rotate(decoded);
  for (std::size_t i = 0; i < block; ++i) decoded[i] *= rotation_norm;
  change_signs(decoded);
}

// `decoded` may be null.
void encode_integers(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* decoded) {
  float rotated[block];
  if (is_rotated(codec) && count == block) {
    for (std::size_t i = 0; i < block; ++i) rotated[i] = values[i] * rotation_norm;
    change_signs(rotated);
    rotate(rotated);
    values = rotated;
  }
  std::int32_t largest_bits = 0;  // of magnitudes: ordered like the numbers, infinities and NaNs above all
  for (std::size_t i = 0; i < count; ++i)
    largest_bits = std::max(largest_bits, std::bit_cast<std::int32_t>(values[i]) & magnitude_mask);
  const float most = is_int4(codec) ? 7.0F : 127.0F;
  float scale = std::bit_cast<float>(largest_bits) / most;
  float inverse = 1.0F / scale;
  if (largest_bits >= infinity_bits) {
    scale = std::numeric_limits<float>::quiet_NaN();
    inverse = 0;
  } else if (!std::isfinite(inverse)) {  // all zero, or so small that the error of taking them for zero is
    scale = inverse = 0;
  }
  std::int8_t codes[block];
  if (largest_bits >= infinity_bits) {
    std::memset(codes, 0, sizeof codes);
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const float whole = values[i] * inverse + round_to_whole - round_to_whole;
      codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(whole));
    }
  }
  std::memcpy(encoded, &scale, sizeof scale);
  if (is_int4(codec)) {
    std::uint8_t pairs[block / 2];
    const std::size_t half = code_bytes(codec, count);
    if (count % 2 != 0) codes[count] = 0;
    for (std::size_t i = 0; i < half; ++i)
      pairs[i] = static_cast<std::uint8_t>((codes[i] + 8) | ((codes[i + half] + 8) << 4));
    std::memcpy(encoded + sizeof scale, pairs, half);
  } else {
    std::memcpy(encoded + sizeof scale, codes, count);
  }
  if (decoded != nullptr) decode_integers(codec, encoded, count, decoded);
}

std::size_t block_bytes(Codec codec, std::size_t count) {
  if (count == 0) return 0;
  return codec == Codec::bf16 ? count * sizeof(std::uint16_t) : sizeof(float) + code_bytes(codec, count);
}

void encode_block(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* decoded) {
  if (codec == Codec::bf16)
    encode_bf16(values, count, encoded, decoded);
  else
    encode_integers(codec, values, count, encoded, decoded);
}

void decode_block(Codec codec, const std::byte* encoded, std::size_t count, float* decoded) {
  if (codec == Codec::bf16)
    decode_bf16(encoded, count, decoded);
  else
    decode_integers(codec, encoded, count, decoded);
}

}  // namespace

std::string_view name(Codec codec) {
  if (codec == Codec::bf16) return "bf16";
  return is_int4(codec) ? "int4" : "int8";
}

Codec codec_from_name(std::string_view name, bool rotation) {
  if (name == "int8") return rotation ? Codec::int8_rotated : Codec::int8;
  if (name == "int4") return rotation ? Codec::int4_rotated : Codec::int4;
  if (name != "bf16")
    throw UsageError("compression '" + std::string(name) + "' does not exist; use one of: bf16, int8, int4");
  if (rotation) throw UsageError("bf16 has no scale that a rotation would improve; leave rotation out");
  return Codec::bf16;
}

std::size_t encoded_bytes(Codec codec, std::size_t count) {
  return count / block * block_bytes(codec, block) + block_bytes(codec, count % block);
}

void encode(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* residual) {
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = std::min(block, count - at);
    if (residual == nullptr) {
      encode_block(codec, values + at, n, encoded, nullptr);
    } else {
      float* lost = residual + at;
      float wanted[block];
      float decoded[block];
      for (std::size_t i = 0; i < n; ++i) wanted[i] = values[at + i] + lost[i];
      encode_block(codec, wanted, n, encoded, decoded);
      for (std::size_t i = 0; i < n; ++i) {
        const float difference = wanted[i] - decoded[i];
        lost[i] = std::isfinite(difference) ? difference : 0.0F;
      }
    }
    encoded += block_bytes(codec, n);
  }
}

void decode(Codec codec, const std::byte* encoded, std::size_t count, float* values, bool add) {
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = std::min(block, count - at);
    if (add) {
      float decoded[block];
      decode_block(codec, encoded, n, decoded);
      for (std::size_t i = 0; i < n; ++i) values[at + i] += decoded[i];
    } else {
      decode_block(codec, encoded, n, values + at);
    }
    encoded += block_bytes(codec, n);
  }
}

}  // namespace holmes
