// random_number: 64 bits that no other process has, for identities. (Secrets: bootstrap/secret.hpp.)
#pragma once

#include <cstdint>
#include <random>

namespace holmes {

inline std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

}  // namespace holmes
