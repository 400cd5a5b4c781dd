// The fake NCCL's arithmetic: slow and plain, in double.
#pragma once

#include <cstddef>
#include <vector>

namespace fake_nccl {

std::size_t element_bytes(int data_type);

// A floating point scalar of this type.
double scalar_value(const void* scalar, int data_type);

// out[i] = the reduction of inputs[r][i], in the order of r. `op`: 0 sum, 1 product, 2 max, 3 min, 4 average, 5 and
// more: sum of scale * input.
void reduce(void* out, const std::vector<const char*>& inputs, std::size_t count, int data_type, int op, double scale);

}  // namespace fake_nccl
