// Python objects as buffers: torch CPU tensors, anything with DLPack (CPU), anything with the buffer protocol (numpy,
// ...).
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/core/types.hpp"

namespace holmes {

// The memory of `object`, which stays alive as long as the Buffer does. Throws UsageError naming `what` and the reason
// where the object is not contiguous host memory of a supported dtype, or not writable where `writable` is asked for.
Buffer to_buffer(const pybind11::handle& object, const char* what, bool writable);

}  // namespace holmes
