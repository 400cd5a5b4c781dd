// Copies that may bypass the cache.
#pragma once

#include <cstddef>

namespace holmes {

// memcpy. With `non_temporal` the stores go around the cache, which pays off when the whole operation's output is much
// larger than the cache (measured: from about 8 to 16 MiB) and hurts below: the caller knows the total. The regions
// must not overlap. Non-temporal stores are fenced before return, so a later release store publishes them as usual.
void copy_stream(void* destination, const void* source, std::size_t bytes, bool non_temporal);

}  // namespace holmes
