// CRC32C (Castagnoli; RFC 3720, section 12.1): what tells that bytes have changed on their way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holmes {

// Of `data` behind what has `crc` already (0: nothing). Uses the processor's instruction where there is one.
std::uint32_t crc32c(std::uint32_t crc, const std::byte* data, std::size_t bytes);
// The same by a table, for machines without and as the test's reference.
std::uint32_t crc32c_by_table(std::uint32_t crc, const std::byte* data, std::size_t bytes);

// How an IntegrityError ends: what to do about it.
inline constexpr const char* integrity_advice =
    "; memory, a NIC or a bus of one of the two hosts is faulty: look at its error counters (edac-util, ethtool -S) "
    "and leave it out";

}  // namespace holmes
