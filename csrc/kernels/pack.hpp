// Tensors on a GPU to and from one flat bucket, with cast and scale, in one kernel launch for up to 128 tensors.
// A C interface of libholmes_cuda, which is found with dlopen: nothing of Holmes needs CUDA.
#pragma once

#include <cstddef>

#include "holmes/core/types.hpp"

namespace holmes {

// A tensor (contiguous device memory) and its place in the bucket, in elements.
struct PackSegment {
  void* tensor;
  std::size_t count;
  std::size_t bucket_offset;
};

}  // namespace holmes

extern "C" {

// pack: bucket[offset + i] = tensor[i] * scale; unpack: tensor[i] = bucket[offset + i] * scale. Computed in float32 and
// rounded to nearest even. Data types: float32, float16 and bfloat16, alike or not on the two sides. Segments must not
// overlap where they are written; `segments` may be freed on return. `stream` is a cudaStream_t of the current device
// (null: the default stream), on which the work is queued; nothing waits for it. Thread-safe. Returns 0, or a
// cudaError_t with the reason in holmes_cuda_last_error() (cudaErrorInsufficientDriver or cudaErrorNoDevice on a
// machine without GPU).
int holmes_cuda_pack(void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                     const holmes::PackSegment* segments, std::size_t segment_count, holmes::DType tensor_dtype,
                     float scale, void* stream);
int holmes_cuda_unpack(const void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                       const holmes::PackSegment* segments, std::size_t segment_count, holmes::DType tensor_dtype,
                       float scale, void* stream);

// What went wrong in this thread's last failed call; valid until its next call.
const char* holmes_cuda_last_error();
}
