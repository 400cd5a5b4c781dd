// Plain loops over blocks that the compiler vectorises: a core encodes and decodes faster than the slow links carry.
#include "holmes/reduce/compression.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::size_t block = int8_block;
constexpr std::size_t int8_block_bytes = sizeof(float) + block;
constexpr std::int32_t magnitude_mask = 0x7fffffff;
constexpr std::int32_t infinity_bits = 0x7f800000;
constexpr float int8_limit = 127.0F;
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

void decode_int8(const std::byte* encoded, std::size_t count, float* decoded) {
  float scale;
  std::memcpy(&scale, encoded, sizeof scale);
  std::int8_t codes[block];
  std::memcpy(codes, encoded + sizeof scale, count);
  for (std::size_t i = 0; i < count; ++i) decoded[i] = scale * static_cast<float>(codes[i]);
}

void encode_int8(const float* values, std::size_t count, std::byte* encoded, float* decoded) {
  std::int32_t largest_bits = 0;  // of magnitudes: ordered like the numbers, infinities and NaNs above all
  for (std::size_t i = 0; i < count; ++i)
    largest_bits = std::max(largest_bits, std::bit_cast<std::int32_t>(values[i]) & magnitude_mask);
  float scale = std::bit_cast<float>(largest_bits) / int8_limit;
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
  std::memcpy(encoded + sizeof scale, codes, count);
  if (decoded != nullptr) decode_int8(encoded, count, decoded);
}

std::size_t block_bytes(Codec codec, std::size_t count) {
  return codec == Codec::bf16 ? count * sizeof(std::uint16_t) : sizeof(float) + count;
}

}  // namespace

std::size_t encoded_bytes(Codec codec, std::size_t count) {
  if (codec == Codec::bf16) return count * sizeof(std::uint16_t);
  return count / block * int8_block_bytes + (count % block ? sizeof(float) + count % block : 0);
}

void encode(Codec codec, const float* values, std::size_t count, std::byte* encoded, float* residual) {
  const auto encode_block = codec == Codec::bf16 ? encode_bf16 : encode_int8;
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = std::min(block, count - at);
    if (residual == nullptr) {
      encode_block(values + at, n, encoded, nullptr);
    } else {
      float* lost = residual + at;
      float wanted[block];
      float decoded[block];
      for (std::size_t i = 0; i < n; ++i) wanted[i] = values[at + i] + lost[i];
      encode_block(wanted, n, encoded, decoded);
      for (std::size_t i = 0; i < n; ++i) {
        const float difference = wanted[i] - decoded[i];
        lost[i] = std::isfinite(difference) ? difference : 0.0F;
      }
    }
    encoded += block_bytes(codec, n);
  }
}

void decode(Codec codec, const std::byte* encoded, std::size_t count, float* values, bool add) {
  const auto decode_block = codec == Codec::bf16 ? decode_bf16 : decode_int8;
  for (std::size_t at = 0; at < count; at += block) {
    const std::size_t n = std::min(block, count - at);
    if (add) {
      float decoded[block];
      decode_block(encoded, n, decoded);
      for (std::size_t i = 0; i < n; ++i) values[at + i] += decoded[i];
    } else {
      decode_block(encoded, n, values + at);
    }
    encoded += block_bytes(codec, n);
  }
}

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
