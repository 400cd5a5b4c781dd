// The C interface of libholmes_cuda, which is found with dlopen: nothing of Holmes needs CUDA.
//
// All functions: data types are float32, float16 and bfloat16; values are computed in float32 and rounded to nearest
// even. `stream` is a cudaStream_t of the current device (null: the default stream), on which the work is queued;
// nothing waits for it, and what the arguments point to on the host may be freed on return. Thread-safe. They return 0,
// or a cudaError_t with the reason in holmes_cuda_last_error() (cudaErrorInsufficientDriver or cudaErrorNoDevice on a
// machine without GPU).
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

// A tensor and what its squares are multiplied by.
struct NormTensor {
  const void* tensor;
  std::size_t count;
  float weight;
};

}  // namespace holmes

extern "C" {

// pack: bucket[offset + i] = tensor[i] * scale; unpack: tensor[i] = bucket[offset + i] * scale; accumulate:
// bucket[offset + i] += tensor[i] * scale, for a float32 bucket. One launch for up to 128 tensors. Segments must not
// overlap where they are written.
int holmes_cuda_pack(void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                     const holmes::PackSegment* segments, std::size_t segment_count, holmes::DType tensor_dtype,
                     float scale, void* stream);
int holmes_cuda_unpack(const void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                       const holmes::PackSegment* segments, std::size_t segment_count, holmes::DType tensor_dtype,
                       float scale, void* stream);
int holmes_cuda_accumulate(void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                           const holmes::PackSegment* segments, std::size_t segment_count, holmes::DType tensor_dtype,
                           float scale, void* stream);

// output[i] = scale * the sum of shards[s][i] over 1 to 256 shards of `count` elements, summed in float32 in their
// order. `output` may be none of them.
int holmes_cuda_sum_shards(void* output, holmes::DType output_dtype, const void* const* shards, std::size_t shard_count,
                           holmes::DType shard_dtype, std::size_t count, float scale, void* stream);

// result[0] (device memory) = the sum over all tensors of weight * the sum of their squares, in float64; not finite
// exactly where an element is not (with finite weights). The same bits on every GPU. `workspace`: device memory for
// holmes_cuda_norm_workspace_count() float64 numbers, used until the work is done.
int holmes_cuda_squared_norm(double* result, double* workspace, const holmes::NormTensor* tensors,
                             std::size_t tensor_count, holmes::DType dtype, void* stream);
std::size_t holmes_cuda_norm_workspace_count();

// What went wrong in this thread's last failed call; valid until its next call.
const char* holmes_cuda_last_error();
}
