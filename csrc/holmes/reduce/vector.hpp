// Vectors of the instruction set being compiled for, and the element types over them. Only reduce_kernels.cpp includes
// this: everything is local to that translation unit, because the linker must never pick an AVX copy of a shared inline
// function for a machine without AVX. For the same reason nothing here may use the standard library's inline functions.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace holmes::HOLMES_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;
#else
constexpr std::size_t vector_bytes = 16;
#endif

template <typename T, std::size_t bytes = vector_bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <typename T, std::size_t bytes = vector_bytes>
using Vector = typename VectorOf<T, bytes>::type;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;
using Halfwords = Vector<std::uint16_t, vector_bytes / 2>;  // as many lanes as Floats

template <typename V>
inline V load(const void* from) {
  V vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <typename V>
inline void store(void* to, V vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

// `to` is aligned to the size of V. A plain store where the instruction set has none of that size.
template <typename V>
inline void store_non_temporal(void* to, V vector) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), (__m512i)vector);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)vector);
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)vector);
#endif
  store(to, vector);
}

inline void fence_non_temporal() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// An element type: `Packed` is a vector as it lies in memory, `Wide` the same elements as they are computed with.
template <typename T>
struct Plain {
  using Packed = Vector<T>;
  using Wide = Vector<T>;
  using Lane = T;
  static constexpr std::size_t element_bytes = sizeof(T);
  static Wide widen(Packed packed) { return packed; }
  static Packed narrow(Wide wide) { return wide; }
};

struct Boolean : Plain<std::uint8_t> {
  static Wide widen(Packed packed) { return packed != 0 ? Wide{} + 1 : Wide{}; }
};

// The upper half of a float32. Elements 0, 2, 4... and 1, 3, 5... make a vector each: no shuffles.
struct Bfloat16 {
  using Packed = Words;
  struct Wide {
    Floats even, odd;
    friend Wide operator+(Wide a, Wide b) { return {a.even + b.even, a.odd + b.odd}; }
    friend Wide operator*(Wide a, Wide b) { return {a.even * b.even, a.odd * b.odd}; }
    friend Wide operator*(Wide a, float b) { return {a.even * b, a.odd * b}; }
    friend Wide operator/(Wide a, float b) { return {a.even / b, a.odd / b}; }
  };
  using Lane = float;
  static constexpr std::size_t element_bytes = 2;
  static Wide widen(Packed packed) { return {(Floats)(packed << 16), (Floats)(packed & 0xffff0000u)}; }
  static Packed narrow(Wide wide) { return (rounded(wide.even) >> 16) | (rounded(wide.odd) & 0xffff0000u); }

private:
  static Words rounded(Floats wide) {  // in the upper half, to nearest even
    const Words bits = (Words)wide;
    return wide == wide ? bits + 0x7fff + ((bits >> 16) & 1) : Words{} + 0x7fc00000u;
  }
};

// A NaN wins, from either side: it is unequal to itself, and no comparison with it is true.
template <typename V>
inline V minimum(V a, V b) {
  return (a < b) | (a != a) ? a : b;
}
template <typename V>
inline V maximum(V a, V b) {
  return (a > b) | (a != a) ? a : b;
}
inline Bfloat16::Wide minimum(Bfloat16::Wide a, Bfloat16::Wide b) {
  return {minimum(a.even, b.even), minimum(a.odd, b.odd)};
}
inline Bfloat16::Wide maximum(Bfloat16::Wide a, Bfloat16::Wide b) {
  return {maximum(a.even, b.even), maximum(a.odd, b.odd)};
}

struct Float16 {
  using Packed = Halfwords;
  using Wide = Floats;
  using Lane = float;
  static constexpr std::size_t element_bytes = 2;
#if defined(__AVX512F__)
  static Wide widen(Packed packed) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)packed); }
  static Packed narrow(Wide wide) {
    return (Halfwords)_mm512_maskz_cvtps_ph(0xffff, (__m512)wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__F16C__)
  static Wide widen(Packed packed) { return (Floats)_mm256_cvtph_ps((__m128i)packed); }
  static Packed narrow(Wide wide) {
    return (Halfwords)_mm256_cvtps_ph((__m256)wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__aarch64__)
  static Wide widen(Packed packed) { return (Floats)vcvt_f32_f16((float16x4_t)packed); }
  static Packed narrow(Wide wide) { return (Halfwords)vcvt_f16_f32((float32x4_t)wide); }
#else
  // Exponents are shifted by multiplying with powers of two; subnormal results get the exponent at which adding makes
  // the float32 unit round at the last kept bit.
  static Wide widen(Packed packed) {
    const Words word = unpack(packed) << 16;
    const Words twice = word + word;  // without the sign
    const Floats normal = (Floats)((twice >> 4) + (0xe0u << 23)) * 0x1p-112f;
    const Floats subnormal = (Floats)((twice >> 17) | (126u << 23)) - 0.5f;
    return (Floats)((word & 0x80000000u) | (twice < (1u << 27) ? (Words)subnormal : (Words)normal));
  }
  static Packed narrow(Wide wide) {
    const Words word = (Words)wide;
    const Words sign = word & 0x80000000u;
    const Words twice = word + word;
    const Words exponent = twice & 0xff000000u;
    const Words bias = exponent < 0x71000000u ? Words{} + 0x71000000u : exponent;
    const Floats scaled = (Floats)(word ^ sign) * 0x1p+112f * 0x1p-110f;  // overflows to infinity where float16 does
    const Words bits = (Words)((Floats)((bias >> 1) + 0x07800000u) + scaled);
    const Words finite = ((bits >> 13) & 0x7c00u) + (bits & 0x0fffu);
    return pack((sign >> 16) | (twice > 0xff000000u ? Words{} + 0x7e00u : finite));
  }

private:
#if defined(__x86_64__)  // GCC 12 takes __builtin_convertvector apart lane by lane
  static Words unpack(Packed packed) {
    return (Words)_mm_unpacklo_epi16(_mm_cvtsi64_si128((long long)packed), _mm_setzero_si128());
  }
  static Packed pack(Words words) {
    const __m128i extended = _mm_srai_epi32(_mm_slli_epi32((__m128i)words, 16), 16);  // packs saturates signed numbers
    return (Packed)_mm_cvtsi128_si64(_mm_packs_epi32(extended, extended));
  }
#else
  static Words unpack(Packed packed) { return __builtin_convertvector(packed, Words); }
  static Packed pack(Words words) { return __builtin_convertvector(words, Packed); }
#endif
#endif
};

}  // namespace
}  // namespace holmes::HOLMES_ISA
