#include "holmes/core/text.hpp"

#include <array>
#include <cstddef>

namespace holmes {
namespace {

// Of the character that begins at `at`; 0 where none does. As Python reads UTF-8: the shortest form, no surrogates.
std::size_t character_bytes(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  const unsigned second = byte(at + 1);
  if (first < 0xC2 || !follows(at + 1)) return 0;
  if (first < 0xE0) return 2;
  if (!follows(at + 2)) return 0;
  if (first < 0xF0) return (first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0) ? 0 : 3;
  if (first > 0xF4 || !follows(at + 3)) return 0;
  return (first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90) ? 0 : 4;
}

}  // namespace

std::string readable(std::string text) {
  constexpr std::string_view digits = "0123456789abcdef";
  for (std::size_t at = 0; at < text.size();) {
    if (const std::size_t bytes = character_bytes(text, at)) {
      at += bytes;
      continue;
    }
    const auto byte = static_cast<unsigned char>(text[at]);
    const std::array<char, 4> shown{'\\', 'x', digits[byte / 16], digits[byte % 16]};
    text.replace(at, 1, shown.data(), shown.size());
    at += shown.size();
  }
  return text;
}

}  // namespace holmes
