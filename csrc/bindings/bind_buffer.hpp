// Python objects as buffers. Host memory: torch CPU tensors, anything with DLPack, anything with the buffer protocol
// (numpy, ...). A GPU's memory: torch CUDA tensors, anything with __cuda_array_interface__ (cupy, numba, ...) or
// DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "holmes/core/types.hpp"

namespace holmes {

// What an operation needs of a buffer.
struct BufferUse {
  const char* what;    // "all_reduce: tensor", for errors
  bool writable;       // the operation writes into it
  bool outlives_call;  // asynchronous: the Buffer keeps the object alive; else the caller's reference does
  std::optional<int> device = std::nullopt;  // number of the GPU whose memory it must be; absent: host memory
  bool any_gpu = false;                      // without `device`: a GPU's memory too, whichever it is
};

// The memory of `object`. Throws UsageError naming `use.what` and the reason where the object is not contiguous memory
// of a supported dtype in the right place, not writable where that is needed, or its memory is not what it stands for.
Buffer to_buffer(const pybind11::handle& object, const BufferUse& use);

// --- for the readers of the several kinds of object ---
inline constexpr const char* supported_dtypes =
    "float64, float32, float16, bfloat16, int8, int16, int32, int64, uint8, bool";
[[noreturn]] void refuse_buffer(const char* what, const pybind11::handle& object, const std::string& reason);
// A dtype of the buffer protocol or of a typestr ("<f4": its letter and size).
DType dtype_of_format(const char* what, const pybind11::handle& object, const std::string& format,
                      pybind11::ssize_t item_bytes);
// The number of the GPU in whose memory the object is; absent: none.
std::optional<int> gpu_of(const pybind11::handle& object);
// As to_buffer, for a GPU's memory.
Buffer to_device_buffer(const pybind11::handle& object, const BufferUse& use);
// DLPack (https://dmlc.github.io/dlpack), memory of any array library: what is behind object.__dlpack__(), of the host
// or of the GPU `use.device`. Throws UsageError naming `use.what` and the reason. A GPU's memory is asked for ready on
// the legacy default stream.
Buffer from_dlpack(const pybind11::handle& object, const BufferUse& use);

}  // namespace holmes
