// Torch's tensors on the processor in shared memory, for as long as somebody asks for that.
#pragma once

#include <cstddef>

namespace holmes::torch_backend {

// From now on torch takes CPU memory of at least so many bytes from shared buffers where the system gives some, and all
// other, or with 0 all memory, from where it did before. Tensors keep what they have. Throws UsageError where another
// allocator of a higher priority is in place.
void share_tensors_from(std::size_t min_bytes);

}  // namespace holmes::torch_backend
