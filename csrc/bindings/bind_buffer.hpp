// Python objects as buffers: torch CPU tensors, anything with DLPack (CPU), anything with the buffer protocol (numpy,
// ...).
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/core/types.hpp"

namespace holmes {

// What an operation needs of a buffer.
struct BufferUse {
  const char* what;    // "all_reduce: tensor", for errors
  bool writable;       // the operation writes into it
  bool outlives_call;  // asynchronous: the Buffer keeps the object alive; else the caller's reference does
};

// The memory of `object`. Throws UsageError naming `use.what` and the reason where the object is not contiguous host
// memory of a supported dtype, or not writable where that is needed.
Buffer to_buffer(const pybind11::handle& object, const BufferUse& use);

}  // namespace holmes
