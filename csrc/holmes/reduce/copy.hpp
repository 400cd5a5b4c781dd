// Copies that may bypass the cache.
#pragma once

#include <cstddef>

namespace holmes {

// Outputs of at least this size are written past the cache, which could not hold them anyway (measured: +10 to 20 %).
inline constexpr std::size_t cache_bypass_bytes = 16 * 1024 * 1024;

// memcpy. With `non_temporal` the stores go around the cache, which pays off when the whole operation's output is much
// larger than the cache (measured: from about 8 to 16 MiB) and hurts below: the caller knows the total. The regions
// must not overlap. Non-temporal stores are fenced before return, so a later release store publishes them as usual.
void copy_stream(void* destination, const void* source, std::size_t bytes, bool non_temporal);

// memcpy for data that stays in the cache, also where the destination is not aligned to a cache line, as numpy's arrays
// are not (measured on Zen 4: 1.3 to 1.6 times libc's there, equal elsewhere).
void copy_cached(void* destination, const void* source, std::size_t bytes);

}  // namespace holmes
