// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104): the proof of the job's secret.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace holmes {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);
// Compare in constant time.
bool equal_digests(const Digest& left, const Digest& right);
bool equal_texts(std::string_view left, std::string_view right);

}  // namespace holmes
