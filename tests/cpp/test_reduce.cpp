// Every kernel of every instruction set of this machine against a scalar reference that shares no code with them.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "holmes/core/error.hpp"
#include "holmes/reduce/copy.hpp"
#include "holmes/reduce/kernels.hpp"
#include "holmes/reduce/reduce.hpp"

namespace {

using holmes::DType;
using holmes::ReduceOp;
using Bytes = std::vector<unsigned char>;

long checks = 0;
long failures = 0;

void expect(bool good, const std::string& what) {
  ++checks;
  if (!good && ++failures <= 20) std::printf("FAILED %s\n", what.c_str());
}

template <typename T>
T get(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A 16-bit float format, decoded and encoded by its definition.
struct Format {
  int mantissa_bits, min_exponent, max_exponent;

  float decode(std::uint16_t bits) const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const bool special = exponent == max_exponent - min_exponent + 2;
    float value = special ? (mantissa ? std::nanf("") : INFINITY)
                  : exponent
                      ? std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - 1 + min_exponent - mantissa_bits)
                      : std::ldexp(float(mantissa), min_exponent - mantissa_bits);
    return bits & 0x8000 ? -value : value;
  }

  std::uint16_t encode(float value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const int special = (max_exponent - min_exponent + 2) << mantissa_bits;
    if (std::isnan(value)) return std::uint16_t(special | 1);
    if (std::isinf(value)) return std::uint16_t(sign | special);
    const double magnitude = std::fabs(double(value));
    const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), min_exponent) : min_exponent;
    const double units = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));  // to nearest even
    const int bits = int(units) + ((exponent - min_exponent) << mantissa_bits);  // a carry raises the exponent
    return std::uint16_t(sign | std::min(bits, special));
  }
};
constexpr Format float16{10, -14, 15};
constexpr Format bfloat16{7, -126, 127};

template <typename T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::min || op == ReduceOp::max) {
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      return op == ReduceOp::min ? (a < b ? a : b) : (a > b ? a : b);
    }
    return op == ReduceOp::product ? a * b : a + b;
  } else {
    using U = std::uint64_t;
    switch (op) {
      case ReduceOp::min:
        return std::min(a, b);
      case ReduceOp::max:
        return std::max(a, b);
      case ReduceOp::product:
        return T(U(a) * U(b));
      case ReduceOp::band:
        return T(a & b);
      case ReduceOp::bor:
        return T(a | b);
      case ReduceOp::bxor:
        return T(a ^ b);
      default:
        return T(U(a) + U(b));
    }
  }
}

// The expected element, and whether `actual` is it (a NaN equals any NaN).
template <typename T>
bool matches(ReduceOp op, const std::vector<const unsigned char*>& from, int total, const unsigned char* actual) {
  T value = get<T>(from[0]);
  for (std::size_t s = 1; s < from.size(); ++s) value = combine(op, value, get<T>(from[s]));
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::avg) value /= T(total);
    if (std::isnan(value)) return std::isnan(get<T>(actual));
  }
  return std::memcmp(&value, actual, sizeof value) == 0;
}

bool matches(Format format, ReduceOp op, const std::vector<const unsigned char*>& from, int total,
             const unsigned char* actual) {
  float value = format.decode(get<std::uint16_t>(from[0]));
  for (std::size_t s = 1; s < from.size(); ++s) value = combine(op, value, format.decode(get<std::uint16_t>(from[s])));
  if (op == ReduceOp::avg) value /= float(total);
  const auto bits = get<std::uint16_t>(actual);
  return std::isnan(value) ? std::isnan(format.decode(bits)) : bits == format.encode(value);
}

bool matches_bool(ReduceOp op, const std::vector<const unsigned char*>& from, const unsigned char* actual) {
  int ones = 0;
  for (const unsigned char* source : from) ones += *source != 0;
  const bool all = op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band;
  return *actual == (op == ReduceOp::bxor ? ones % 2 : all ? ones == int(from.size()) : ones > 0);
}

bool matches(DType dtype, ReduceOp op, const std::vector<const unsigned char*>& from, int total,
             const unsigned char* actual) {
  switch (dtype) {
    case DType::float64:
      return matches<double>(op, from, total, actual);
    case DType::float32:
      return matches<float>(op, from, total, actual);
    case DType::float16:
      return matches(float16, op, from, total, actual);
    case DType::bfloat16:
      return matches(bfloat16, op, from, total, actual);
    case DType::int8:
      return matches<std::int8_t>(op, from, total, actual);
    case DType::int16:
      return matches<std::int16_t>(op, from, total, actual);
    case DType::int32:
      return matches<std::int32_t>(op, from, total, actual);
    case DType::int64:
      return matches<std::int64_t>(op, from, total, actual);
    case DType::uint8:
      return matches<std::uint8_t>(op, from, total, actual);
    case DType::boolean:
      return matches_bool(op, from, actual);
  }
  return false;
}

bool allowed(DType dtype, ReduceOp op) {
  try {
    holmes::check_reduction(dtype, op);
    return true;
  } catch (const holmes::UsageError&) {
    return false;
  }
}

std::mt19937 random_bits{2024};

// Half of the floats are small numbers with a short mantissa, so that sums are not always infinite, with ties to round;
// the rest is any bits: NaN, infinities, subnormals.
void fill(Bytes& bytes, DType dtype) {
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random_bits());
  if (dtype == DType::boolean)
    for (auto& byte : bytes) byte = byte & 8 ? byte : 0;  // any byte but 0 is true
  if (!holmes::is_floating(dtype) || random_bits() % 2) return;
  const std::size_t size = holmes::size_bytes(dtype);
  for (std::size_t at = 0; at + size <= bytes.size(); at += size) {
    const float value = float(int(random_bits() % 4097) - 2048) / float(1 << random_bits() % 12);
    const double wide = value;
    const std::uint16_t narrow = (dtype == DType::float16 ? float16 : bfloat16).encode(value);
    std::memcpy(&bytes[at], size == 8 ? (const void*)&wide : size == 4 ? (const void*)&value : &narrow, size);
  }
}

constexpr std::size_t guard_bytes = 64;
constexpr unsigned char guard = 0xa5;

// One call: sources at `offset`, 2 * `offset`, ... bytes past an aligned address; the bytes around the output must
// stay.
void check(const holmes::KernelSet& kernels, DType dtype, ReduceOp op, int source_count, std::size_t count,
           std::size_t offset, bool in_place, bool non_temporal) {
  const std::size_t bytes = count * holmes::size_bytes(dtype);
  std::vector<Bytes> sources(source_count);
  std::vector<const void*> pointers;
  for (int s = 0; s < source_count; ++s) {
    const std::size_t shift = offset * (s + 1) % 64;
    sources[s].resize(shift + bytes);
    Bytes content(bytes);
    fill(content, dtype);
    if (bytes) std::memcpy(sources[s].data() + shift, content.data(), bytes);
    pointers.push_back(sources[s].data() + shift);
  }
  const auto originals = sources;
  Bytes output(2 * guard_bytes + bytes + offset, guard);
  const std::size_t begin = guard_bytes + offset;
  void* destination = in_place ? const_cast<void*>(pointers.back()) : output.data() + begin;
  const int total = source_count + int(offset % 3);
  kernels.reduce[int(dtype)][int(op)]({destination, pointers.data(), source_count, count, total, non_temporal});

  const std::string what = std::string(kernels.name) + " " + std::string(name(dtype)) + " " + std::string(name(op)) +
                           " sources=" + std::to_string(source_count) + " count=" + std::to_string(count) +
                           " offset=" + std::to_string(offset) + (in_place ? " in place" : "") +
                           (non_temporal ? " non-temporal" : "");
  bool good = true;
  const std::size_t size = holmes::size_bytes(dtype);
  std::vector<const unsigned char*> from(source_count);
  for (std::size_t i = 0; i < count && good; ++i) {
    for (int s = 0; s < source_count; ++s) from[s] = &originals[s][offset * (s + 1) % 64 + i * size];
    good = matches(dtype, op, from, total, static_cast<unsigned char*>(destination) + i * size);
  }
  expect(good, what);
  if (in_place) return;
  for (std::size_t i = 0; i < output.size(); ++i)
    if (i < begin || i >= begin + bytes) good = good && output[i] == guard;
  expect(good && sources == originals, what + " wrote outside of the destination");
}

void test_kernels(const holmes::KernelSet& kernels) {
  for (int d = 0; d < holmes::dtype_count; ++d)
    for (int o = 0; o < holmes::reduce_op_count; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      expect((kernels.reduce[d][o] != nullptr) == allowed(dtype, op),
             "kernel exists only where allowed: " + std::string(name(dtype)) + " " + std::string(name(op)));
      if (!allowed(dtype, op)) continue;
      for (int sources = 1; sources <= 9; ++sources)
        for (std::size_t count : {0u, 1u, 3u, 17u, 63u, 129u, 511u, 1031u})
          for (std::size_t offset : {std::size_t{0}, holmes::size_bytes(dtype), std::size_t{3}})
            check(kernels, dtype, op, sources, count, offset, (sources + count) % 3 == 0, (sources + offset) % 2 == 0);
    }
}

// Every 16-bit pattern through a sum of one source, and every tie between neighbours by a sum of two halves.
void test_all_16_bit_values(const holmes::KernelSet& kernels) {
  for (DType dtype : {DType::float16, DType::bfloat16}) {
    const Format& format = dtype == DType::float16 ? float16 : bfloat16;
    std::vector<std::uint16_t> all(1 << 16), next(1 << 16), out(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = std::uint16_t(i);
      next[i] = std::uint16_t(i + 1);
    }
    const void* sources[] = {all.data(), next.data()};
    kernels.reduce[int(dtype)][int(ReduceOp::sum)]({out.data(), sources, 1, all.size(), 1, false});
    for (std::size_t i = 0; i < all.size(); ++i)
      expect(std::isnan(format.decode(all[i])) ? std::isnan(format.decode(out[i])) : out[i] == all[i], "identity");
    kernels.reduce[int(dtype)][int(ReduceOp::avg)]({out.data(), sources, 2, all.size(), 2, false});
    for (std::size_t i = 0; i < all.size(); ++i)
      expect(matches(format, ReduceOp::avg,
                     {reinterpret_cast<unsigned char*>(&all[i]), reinterpret_cast<unsigned char*>(&next[i])}, 2,
                     reinterpret_cast<unsigned char*>(&out[i])),
             std::string(kernels.name) + " tie of " + std::string(name(dtype)) + " " + std::to_string(i));
  }
}

void test_reduce_entry() {
  const float a[] = {1, 2, 3}, b[] = {10, 20, 30};
  const void* sources[] = {a, b};
  float out[3] = {};
  holmes::reduce(out, sources, 2, 3, DType::float32, ReduceOp::avg, 4);
  expect(out[0] == 2.75f && out[1] == 5.5f && out[2] == 8.25f, "reduce: average over more ranks than sources");
}

void test_copy() {
  for (const holmes::KernelSet* kernels : holmes::supported_kernels())
    for (std::size_t bytes : {0u, 1u, 63u, 255u, 511u, 512u, 4099u, 1u << 20})
      for (unsigned variant = 0; variant < 8; ++variant) {
        const std::size_t offset = std::array{0u, 1u, 64u, 77u}[variant / 2];
        const bool non_temporal = variant % 2;
        Bytes source(bytes + 3), output(bytes + offset + guard_bytes, guard);
        fill(source, DType::uint8);
        (non_temporal ? kernels->copy_non_temporal : kernels->copy)(output.data() + offset, source.data() + 3, bytes);
        bool good = bytes == 0 || std::memcmp(output.data() + offset, source.data() + 3, bytes) == 0;
        for (std::size_t i = 0; i < output.size(); ++i)
          if (i < offset || i >= offset + bytes) good = good && output[i] == guard;
        expect(good, std::string(kernels->name) + " copy of " + std::to_string(bytes));
      }
  Bytes source(100000, 7);
  for (bool non_temporal : {false, true}) {
    Bytes output(source.size());
    holmes::copy_stream(output.data(), source.data(), source.size(), non_temporal);
    expect(output == source, "copy_stream");
    holmes::copy_stream(nullptr, nullptr, 0, non_temporal);
  }
}

}  // namespace

int main() {
  for (const holmes::KernelSet* kernels : holmes::supported_kernels()) {
    const long before = checks;
    test_kernels(*kernels);
    test_all_16_bit_values(*kernels);
    std::printf("%s: %ld checks\n", kernels->name, checks - before);
  }
  test_reduce_entry();
  test_copy();
  std::printf("%ld passed, %ld failed\n", checks - failures, failures);
  return failures ? 1 : 0;
}
