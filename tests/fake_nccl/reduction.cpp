#include "reduction.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fake_nccl {
namespace {

double from_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

std::uint16_t to_half(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent, -13);                                                            // denormal below 2^-14
  const auto fraction = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 11 - exponent)));  // to even
  return static_cast<std::uint16_t>(sign | ((exponent + 13) * 1024 + fraction));
}

double from_bfloat16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

std::uint16_t to_bfloat16(double value) {
  const auto narrow = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Wide>
Wide combine(const std::vector<Wide>& values, int op, double scale) {
  Wide result = values.front();
  if (op >= 5) result = static_cast<Wide>(result * scale);
  for (std::size_t r = 1; r < values.size(); ++r) {
    const Wide next = op >= 5 ? static_cast<Wide>(values[r] * scale) : values[r];
    result = op == 1   ? result * next
             : op == 2 ? std::max(result, next)
             : op == 3 ? std::min(result, next)
                       : result + next;
  }
  return op == 4 ? static_cast<Wide>(result / static_cast<Wide>(values.size())) : result;
}

template <class T, class Wide, class Widen, class Narrow>
void reduce_as(void* out, const std::vector<const char*>& inputs, std::size_t count, int op, double scale, Widen widen,
               Narrow narrow) {
  std::vector<Wide> values(inputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      T element;
      std::memcpy(&element, inputs[r] + i * sizeof(T), sizeof(T));
      values[r] = widen(element);
    }
    const T result = narrow(combine(values, op, scale));
    std::memcpy(static_cast<char*>(out) + i * sizeof(T), &result, sizeof(T));
  }
}

template <class T, class Wide>
void reduce_plain(void* out, const std::vector<const char*>& inputs, std::size_t count, int op, double scale) {
  reduce_as<T, Wide>(
      out, inputs, count, op, scale, [](T x) { return static_cast<Wide>(x); },
      [](Wide x) { return static_cast<T>(x); });
}

}  // namespace

std::size_t element_bytes(int data_type) {
  constexpr std::size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return data_type >= 0 && data_type < 10 ? bytes[data_type] : 0;
}

double scalar_value(const void* scalar, int data_type) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, scalar, sizeof(value));
    return value;
  };
  switch (data_type) {
    case 6:
      return from_half(read(std::uint16_t{}));
    case 7:
      return read(float{});
    case 8:
      return read(double{});
    default:
      return from_bfloat16(read(std::uint16_t{}));
  }
}

void reduce(void* out, const std::vector<const char*>& inputs, std::size_t count, int data_type, int op, double scale) {
  switch (data_type) {
    case 0:
      return reduce_plain<std::int8_t, std::int64_t>(out, inputs, count, op, scale);
    case 1:
      return reduce_plain<std::uint8_t, std::int64_t>(out, inputs, count, op, scale);
    case 2:
      return reduce_plain<std::int32_t, std::int64_t>(out, inputs, count, op, scale);
    case 4:
      return reduce_plain<std::int64_t, std::int64_t>(out, inputs, count, op, scale);
    case 6:
      return reduce_as<std::uint16_t, double>(out, inputs, count, op, scale, from_half, to_half);
    case 7:
      return reduce_plain<float, double>(out, inputs, count, op, scale);
    case 8:
      return reduce_plain<double, double>(out, inputs, count, op, scale);
    case 9:
      return reduce_as<std::uint16_t, double>(out, inputs, count, op, scale, from_bfloat16, to_bfloat16);
    default:
      return;
  }
}

}  // namespace fake_nccl
