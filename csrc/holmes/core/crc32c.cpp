#include "holmes/core/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace holmes {
namespace {

using Table = std::array<std::uint32_t, 256>;

constexpr Table byte_table = [] {
  constexpr std::uint32_t polynomial = 0x82f63b78;  // reflected
  Table table{};
  for (std::uint32_t value = 0; value < table.size(); ++value) {
    std::uint32_t state = value;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? polynomial : 0);
    table[value] = state;
  }
  return table;
}();

#if defined(__x86_64__)
#define HOLMES_CRC_TARGET __attribute__((target("sse4.2")))
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
HOLMES_CRC_TARGET std::uint32_t step_8(std::uint32_t state, std::uint64_t value) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(state, value));
}
HOLMES_CRC_TARGET std::uint32_t step_1(std::uint32_t state, std::uint8_t value) { return _mm_crc32_u8(state, value); }
#elif defined(__aarch64__)
#define HOLMES_CRC_TARGET __attribute__((target("+crc")))
bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
HOLMES_CRC_TARGET std::uint32_t step_8(std::uint32_t state, std::uint64_t value) { return __crc32cd(state, value); }
HOLMES_CRC_TARGET std::uint32_t step_1(std::uint32_t state, std::uint8_t value) { return __crc32cb(state, value); }
#endif

#if defined(HOLMES_CRC_TARGET)

std::uint64_t load_8(const std::byte* data) {
  std::uint64_t value = 0;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// The instruction takes three cycles and one can begin in each: three blocks go side by side. What a block's state
// becomes behind so many further bytes is linear in its bits, so a table for each of its bytes says it.
constexpr std::size_t lane_bytes = 4096;

HOLMES_CRC_TARGET std::array<Table, 4> make_shift() {
  std::array<std::uint32_t, 32> of_bit{};
  for (int bit = 0; bit < 32; ++bit) {
    std::uint32_t state = std::uint32_t{1} << bit;
    for (std::size_t i = 0; i < lane_bytes; i += 8) state = step_8(state, 0);
    of_bit[bit] = state;
  }
  std::array<Table, 4> shift{};
  for (std::size_t byte = 0; byte < 4; ++byte)
    for (std::size_t value = 0; value < 256; ++value)
      for (std::size_t bit = 0; bit < 8; ++bit)
        if (value >> bit & 1) shift[byte][value] ^= of_bit[8 * byte + bit];
  return shift;
}

std::uint32_t behind_block(std::uint32_t state) {
  static const std::array<Table, 4> shift = make_shift();
  return shift[0][state & 255] ^ shift[1][state >> 8 & 255] ^ shift[2][state >> 16 & 255] ^ shift[3][state >> 24];
}

HOLMES_CRC_TARGET std::uint32_t by_instruction(std::uint32_t state, const std::byte* data, std::size_t bytes) {
  for (; bytes >= 3 * lane_bytes; data += 3 * lane_bytes, bytes -= 3 * lane_bytes) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < lane_bytes; i += 8) {
      state = step_8(state, load_8(data + i));
      second = step_8(second, load_8(data + lane_bytes + i));
      third = step_8(third, load_8(data + 2 * lane_bytes + i));
    }
    state = behind_block(behind_block(state) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) state = step_8(state, load_8(data));
  for (; bytes > 0; ++data, --bytes) state = step_1(state, static_cast<std::uint8_t>(*data));
  return state;
}

#endif

#if defined(__x86_64__)
#define HOLMES_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq")))

bool can_fold() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"); }

// x^exponent modulo the polynomial, reflected.
constexpr std::uint32_t power_of_x(int exponent) {
  std::uint32_t power = 0x80000000;  // 1
  for (int i = 0; i < exponent; ++i) power = (power >> 1) ^ (power & 1 ? 0x82f63b78 : 0);
  return power;
}

// What multiplies the two halves of 16 bytes that lie so many bits before others, to be added to them. A product of
// reflected halves is one bit too low, and a factor of 32 bits in the low half of 64 stands 32 too high.
template <int bits>
constexpr std::uint64_t factors[2] = {power_of_x(bits + 64 - 33), power_of_x(bits - 33)};

template <int bits>
HOLMES_FOLD_TARGET __m512i folded(__m512i value, __m512i onto) {
  const __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(factors<bits>[1], factors<bits>[0]));
  const __m512i products =
      _mm512_xor_si512(_mm512_clmulepi64_epi128(value, by, 0x00), _mm512_clmulepi64_epi128(value, by, 0x11));
  return _mm512_xor_si512(products, onto);
}

HOLMES_FOLD_TARGET __m128i folded(__m128i value, __m128i onto) {
  const __m128i by = _mm_set_epi64x(factors<128>[1], factors<128>[0]);
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)),
                       onto);
}

constexpr std::size_t folded_at_once = 256;

// Of bytes that are a multiple of folded_at_once: they are folded onto the last 16, which have the same remainder.
HOLMES_FOLD_TARGET std::uint32_t by_folding(std::uint32_t state, const std::byte* data, std::size_t bytes) {
  __m512i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(data + 64 * i);
  sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  for (std::size_t at = folded_at_once; at < bytes; at += folded_at_once)
    for (int i = 0; i < 4; ++i) sums[i] = folded<2048>(sums[i], _mm512_loadu_si512(data + at + 64 * i));
  for (int i = 0; i < 3; ++i) sums[i + 1] = folded<512>(sums[i], sums[i + 1]);
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, sums[3]);
  for (int i = 0; i < 3; ++i) lanes[i + 1] = folded(lanes[i], lanes[i + 1]);
  const auto low = static_cast<std::uint64_t>(_mm_cvtsi128_si64(lanes[3]));
  const auto high = static_cast<std::uint64_t>(_mm_extract_epi64(lanes[3], 1));
  return static_cast<std::uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, low), high));
}
#endif

}  // namespace

std::uint32_t crc32c_by_table(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  std::uint32_t state = ~crc;
  for (std::size_t i = 0; i < bytes; ++i)
    state = (state >> 8) ^ byte_table[(state ^ static_cast<std::uint8_t>(data[i])) & 255];
  return ~state;
}

std::uint32_t crc32c(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
#if defined(HOLMES_CRC_TARGET)
  static const bool is_there = has_instruction();
#if defined(__x86_64__)
  static const bool folds = is_there && can_fold();
  if (const std::size_t most = bytes / folded_at_once * folded_at_once; folds && most >= 2 * folded_at_once)
    return ~by_instruction(by_folding(~crc, data, most), data + most, bytes - most);
#endif
  if (is_there) return ~by_instruction(~crc, data, bytes);
#endif
  return crc32c_by_table(crc, data, bytes);
}

}  // namespace holmes
