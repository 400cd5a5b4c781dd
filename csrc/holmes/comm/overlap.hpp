// check_apart: buffers that an operation writes share no memory with its other ones.
#pragma once

#include <span>

#include "holmes/core/types.hpp"

namespace holmes {

// Throws UsageError naming the buffers where an output shares memory with another output or with an input. What
// `own_output` and `own_input` (indices) name may be the same memory, all of it. Costs a few nanoseconds a buffer.
void check_apart(const char* operation, std::span<const Buffer> outputs, std::size_t own_output,
                 std::span<const Buffer> inputs, std::size_t own_input);

}  // namespace holmes
