// Elements of float32, float16 and bfloat16 for kernels, and a block's threads. All of it compiles for the host too, so
// that what kernels do with indices and bits is tested without a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HOLMES_KERNEL_CODE __host__ __device__
#define HOLMES_UNROLL _Pragma("unroll")
#define HOLMES_UNROLL_4 _Pragma("unroll 4")
#else
#define HOLMES_KERNEL_CODE
#define HOLMES_UNROLL
#define HOLMES_UNROLL_4
#endif

namespace holmes::kernels {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

// One thread of a block of `count`.
struct Thread {
  unsigned index;
  unsigned count;
};

HOLMES_KERNEL_CODE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

HOLMES_KERNEL_CODE inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The bits less their last `shift`, rounded to nearest, ties to even.
HOLMES_KERNEL_CODE inline std::uint32_t rounded(std::uint32_t bits, unsigned shift) {
  const std::uint32_t half = 1u << (shift - 1);
  return (bits + half - 1 + ((bits >> shift) & 1)) >> shift;
}

HOLMES_KERNEL_CODE inline float to_float(float value) { return value; }

HOLMES_KERNEL_CODE inline float to_float(BFloat16 value) { return float_of(std::uint32_t{value.bits} << 16); }

HOLMES_KERNEL_CODE inline float to_float(Half value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  const std::uint32_t sign = std::uint32_t{value.bits & 0x8000u} << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1f;
  const std::uint32_t fraction = value.bits & 0x3ff;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * float_of(103u << 23);  // 2^-24
    return sign ? -magnitude : magnitude;
  }
  return float_of(sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13));
#endif
}

// Rounds to nearest even; what is too large becomes infinite.
HOLMES_KERNEL_CODE inline void from_float(float value, float& to) { to = value; }

HOLMES_KERNEL_CODE inline void from_float(float value, BFloat16& to) {
#ifdef __CUDA_ARCH__
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const std::uint32_t bits = bits_of(value);
  to.bits = static_cast<std::uint16_t>(value != value ? 0x7fff : rounded(bits, 16));
#endif
}

HOLMES_KERNEL_CODE inline void from_float(float value, Half& to) {
#ifdef __CUDA_ARCH__
  to.bits = __half_as_ushort(__float2half_rn(value));
#else
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  std::uint32_t result = 0;
  if (value != value)
    result = 0x7fff;
  else if (magnitude >= 0x477ff000)  // 65520, half way to the next one that there is not
    result = 0x7c00;
  else if (magnitude >= 0x38800000)  // 2^-14, the least normal one
    result = rounded(magnitude - (112u << 23), 13);
  else if (magnitude >= 0x33000000)  // 2^-25
    result = rounded((magnitude & 0x7fffff) | 0x800000, 126 - (magnitude >> 23));
  to.bits = static_cast<std::uint16_t>(sign | result);
#endif
}

}  // namespace holmes::kernels
