#include "holmes/nccl/abi.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes::nccl {
namespace {

// First version with so many bytes.
constexpr std::array<std::pair<int, std::size_t>, 7> config_sizes = {
    {{21800, 48}, {22700, 72}, {22800, 80}, {22900, 88}, {23003, 96}, {23102, 112}, {23203, 120}}};

}  // namespace

std::size_t config_bytes(int version) {
  std::size_t bytes = config_sizes.front().second;
  for (const auto& [first, size] : config_sizes)
    if (version >= first) bytes = size;
  return bytes;
}

Config make_config(int version) {
  Config config;
  config.size = config_bytes(version);
  config.version = static_cast<unsigned>(std::min(version, newest_known_version));
  return config;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::optional<int> data_type_of(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return 0;
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::int32:
      return 2;
    case DType::int64:
      return 4;
    case DType::float16:
      return 6;
    case DType::float32:
      return 7;
    case DType::float64:
      return 8;
    case DType::bfloat16:
      return 9;
    case DType::int16:
      return std::nullopt;
  }
  return std::nullopt;
}

int reduction_of(ReduceOp op, DType dtype) {
  constexpr int sum = 0, product = 1, max = 2, min = 3, avg = 4;
  check_reduction(dtype, op);
  const auto refuse = [&](const std::string& fix) {
    throw UsageError("NCCL has no reduction '" + std::string(name(op)) + "' of " + std::string(name(dtype)) + "; " +
                     fix);
  };
  if (!data_type_of(dtype)) refuse("convert the buffer to int32");
  if (dtype == DType::boolean) {
    // On 0 and 1, max is "or" and min is "and": sums would not stay 0 or 1.
    if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return max;
    if (op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band) return min;
    refuse("convert to int32, sum, and take the lowest bit");
  }
  switch (op) {
    case ReduceOp::sum:
      return sum;
    case ReduceOp::product:
      return product;
    case ReduceOp::max:
      return max;
    case ReduceOp::min:
      return min;
    case ReduceOp::avg:
      return avg;
    default:
      refuse("gather the buffers and combine them, or use a communicator for host memory");
  }
  return sum;
}

namespace {

// A binary float with so many bits behind the leading one and this largest exponent, as its 16 bits.
std::uint16_t to_16_bits(double value, int fraction_bits, int max_exponent) {
  const int exponent_bias = max_exponent;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const auto infinity = static_cast<std::uint16_t>((2 * exponent_bias + 1) << fraction_bits);
  if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | (1 << (fraction_bits - 1)));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
  int exponent = 0;
  std::frexp(magnitude, &exponent);                  // magnitude in [0.5, 1) * 2^exponent
  exponent = std::max(exponent, 2 - exponent_bias);  // denormal below
  const double scaled = std::nearbyint(std::ldexp(magnitude, fraction_bits + 1 - exponent));
  // A leading one carries into the exponent field, and so does rounding up.
  const double bits = scaled + std::ldexp(exponent + exponent_bias - 2, fraction_bits);
  return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::min<double>(bits, infinity)));
}

}  // namespace

Scalar::Scalar(double value, DType dtype) {
  const auto store = [&](auto number) { std::memcpy(bytes_, &number, sizeof(number)); };
  if (dtype == DType::float64)
    store(value);
  else if (dtype == DType::float16)
    store(to_16_bits(value, 10, 15));
  else if (dtype == DType::bfloat16)
    store(to_16_bits(value, 7, 127));
  else
    store(static_cast<float>(value));
}

}  // namespace holmes::nccl
