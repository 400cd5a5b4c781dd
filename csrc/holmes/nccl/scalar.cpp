#include "holmes/nccl/scalar.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace holmes::nccl {
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
