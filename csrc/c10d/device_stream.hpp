// The streams of torch's devices, without CUDA's headers: whatever torch this is built for.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace holmes::torch_backend {

// The CUstream that is this thread's current one on `device`.
void* current_stream(c10::Device device);
// The CUstream of a stream of torch's.
void* native_stream(const c10::Stream& stream);

}  // namespace holmes::torch_backend
