#include "kernels/bucket_move.hpp"
#include "kernels/launch.hpp"

namespace holmes::kernels {
namespace {

template <Move kind, typename Tensor, typename Bucket>
__global__ void __launch_bounds__(block_threads, least_blocks)
    move_kernel(const __grid_constant__ MoveBatch batch, Bucket* bucket, float scale) {
  for (unsigned chunk = blockIdx.x; chunk < batch.table.chunks; chunk += gridDim.x)
    move_in_batch<kind, Tensor>(Thread{threadIdx.x, block_threads}, chunk, batch, bucket, scale);
}

struct Call {
  void* bucket;
  std::size_t bucket_count;
  DType bucket_dtype;
  const PackSegment* segments;
  std::size_t segment_count;
  DType tensor_dtype;
  float scale;
  void* stream;
};

template <Move kind>
int move(const char* name, const Call& call) {
  std::string mistake;
  if (!supports(call.bucket_dtype) || !supports(call.tensor_dtype))
    mistake = dtype_rule;
  else if (kind == Move::accumulate && call.bucket_dtype != DType::float32)
    mistake = "the bucket must be float32, in which the sums are kept";
  else
    mistake = mistake_in(call.bucket, call.bucket_count, size_bytes(call.bucket_dtype), call.segments,
                         call.segment_count, size_bytes(call.tensor_dtype));
  return run(name, mistake, [&] {
    return with_type(call.tensor_dtype, [&](auto tensor) {
      return with_type(call.bucket_dtype, [&](auto bucket) -> cudaError_t {
        using Tensor = decltype(tensor);
        using Bucket = decltype(bucket);
        if constexpr (kind == Move::accumulate && !std::is_same_v<Bucket, float>) {
          return cudaErrorInvalidValue;  // was refused
        } else {
          return in_batches(call.segments, call.segment_count, cudaSuccess, [&](const MoveBatch& batch) {
            return launch<move_kernel<kind, Tensor, Bucket>>(batch.table.chunks, call.stream, batch,
                                                             static_cast<Bucket*>(call.bucket), call.scale);
          });
        }
      });
    });
  });
}

}  // namespace
}  // namespace holmes::kernels

using holmes::DType;
using holmes::PackSegment;
using holmes::kernels::Move;

extern "C" {

HOLMES_API int holmes_cuda_pack(void* bucket, std::size_t bucket_count, DType bucket_dtype, const PackSegment* segments,
                                std::size_t segment_count, DType tensor_dtype, float scale, void* stream) {
  return holmes::kernels::move<Move::pack>(
      "holmes_cuda_pack", {bucket, bucket_count, bucket_dtype, segments, segment_count, tensor_dtype, scale, stream});
}

HOLMES_API int holmes_cuda_unpack(const void* bucket, std::size_t bucket_count, DType bucket_dtype,
                                  const PackSegment* segments, std::size_t segment_count, DType tensor_dtype,
                                  float scale, void* stream) {
  return holmes::kernels::move<Move::unpack>(
      "holmes_cuda_unpack",
      {const_cast<void*>(bucket), bucket_count, bucket_dtype, segments, segment_count, tensor_dtype, scale, stream});
}

HOLMES_API int holmes_cuda_accumulate(void* bucket, std::size_t bucket_count, DType bucket_dtype,
                                      const PackSegment* segments, std::size_t segment_count, DType tensor_dtype,
                                      float scale, void* stream) {
  return holmes::kernels::move<Move::accumulate>(
      "holmes_cuda_accumulate",
      {bucket, bucket_count, bucket_dtype, segments, segment_count, tensor_dtype, scale, stream});
}
}
