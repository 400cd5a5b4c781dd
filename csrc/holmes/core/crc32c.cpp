#include "holmes/core/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
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
constexpr std::size_t block_bytes = 4096;

HOLMES_CRC_TARGET std::array<Table, 4> make_shift() {
  std::array<std::uint32_t, 32> of_bit{};
  for (int bit = 0; bit < 32; ++bit) {
    std::uint32_t state = std::uint32_t{1} << bit;
    for (std::size_t i = 0; i < block_bytes; i += 8) state = step_8(state, 0);
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
  for (; bytes >= 3 * block_bytes; data += 3 * block_bytes, bytes -= 3 * block_bytes) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < block_bytes; i += 8) {
      state = step_8(state, load_8(data + i));
      second = step_8(second, load_8(data + block_bytes + i));
      third = step_8(third, load_8(data + 2 * block_bytes + i));
    }
    state = behind_block(behind_block(state) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) state = step_8(state, load_8(data));
  for (; bytes > 0; ++data, --bytes) state = step_1(state, static_cast<std::uint8_t>(*data));
  return state;
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
  if (is_there) return ~by_instruction(~crc, data, bytes);
#endif
  return crc32c_by_table(crc, data, bytes);
}

}  // namespace holmes
