// Element-wise reduction of several sources into one destination.
#pragma once

#include <cstddef>

#include "holmes/core/types.hpp"

namespace holmes {

// destination[i] = sources[0][i] op sources[1][i] op ... in that order, for i < count; `avg` divides the sum by
// `source_total` (the number of ranks; may exceed `source_count` only where partial results are combined later, then
// use `sum` until the last step). float16 and bfloat16 sums, averages and products accumulate in float32 and round once
// (to nearest even). min and max of floating point return NaN where any source is NaN. Integer sums and products wrap.
// bool: sum, max, bor = or; product, min, band = and; bxor = xor; the result is 0 or 1.
// `destination` may be one of the sources, else they must not overlap. Any alignment. Vectorised for the CPU it runs
// on. Requires source_count >= 1 and check_reduction(dtype, op). `non_temporal_destination` writes around the cache:
// only for a destination that is not read again soon and an operation whose output is much larger than the cache (16
// MiB or more).
void reduce(void* destination, const void* const* sources, int source_count, std::size_t count, DType dtype,
            ReduceOp op, int source_total, bool non_temporal_destination = false);

}  // namespace holmes
