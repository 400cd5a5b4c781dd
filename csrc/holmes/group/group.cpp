#include "holmes/group/group.hpp"

#include <cstdint>

namespace holmes {

std::byte* Group::staging_bytes(std::size_t bytes) {
  constexpr std::size_t alignment = 64;
  if (staging.size() < bytes + alignment) staging.resize(bytes + alignment);
  const auto address = reinterpret_cast<std::uintptr_t>(staging.data());
  return staging.data() + (alignment - address % alignment) % alignment;
}

}  // namespace holmes
