#include "kernels/pack.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <new>
#include <string>
#include <type_traits>

namespace holmes {
namespace {

constexpr int threads = 256;
constexpr int vector_elements = 8;
constexpr std::size_t vector_alignment_bytes = 16;
constexpr std::size_t chunk_elements = 2 * threads * vector_elements;  // of one block
constexpr int max_segments = 128;

// One launch. Passed by value: kernel arguments are limited to 4 KiB.
struct Batch {
  char* tensor[max_segments];
  std::size_t count[max_segments];
  std::size_t bucket_offset[max_segments];
  unsigned first_chunk[max_segments];  // ascending
  int segment_count;
};
static_assert(sizeof(Batch) <= 4000);

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void from_float(float value, float& to) { to = value; }
__device__ void from_float(float value, __half& to) { to = __float2half_rn(value); }
__device__ void from_float(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

template <typename T>
struct alignas(vector_alignment_bytes) Vector {
  T element[vector_elements];
};

__device__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % vector_alignment_bytes == 0;
}

// Block b moves chunk b: at most chunk_elements of one segment.
template <typename Tensor, typename Bucket, bool pack>
__global__ void __launch_bounds__(threads) move_segments(Batch batch, Bucket* bucket, float scale) {
  int segment = 0;
  for (int end = batch.segment_count; end - segment > 1;) {
    const int middle = (segment + end) / 2;
    (batch.first_chunk[middle] <= blockIdx.x ? segment : end) = middle;
  }
  const std::size_t begin = (blockIdx.x - batch.first_chunk[segment]) * chunk_elements;
  const std::size_t left = batch.count[segment] - begin;
  const unsigned count = left < chunk_elements ? left : chunk_elements;
  Tensor* tensor = reinterpret_cast<Tensor*>(batch.tensor[segment]) + begin;
  bucket += batch.bucket_offset[segment] + begin;

  const auto move = [&](auto* to, const auto* from) {
    using To = std::remove_reference_t<decltype(*to)>;
    using From = std::remove_const_t<std::remove_reference_t<decltype(*from)>>;
    unsigned vectors = is_aligned(to) && is_aligned(from) ? count / vector_elements : 0;
    for (unsigned v = threadIdx.x; v < vectors; v += threads) {
      const Vector<From> in = reinterpret_cast<const Vector<From>*>(from)[v];
      Vector<To> out;
#pragma unroll
      for (int i = 0; i < vector_elements; ++i) from_float(to_float(in.element[i]) * scale, out.element[i]);
      reinterpret_cast<Vector<To>*>(to)[v] = out;
    }
    for (unsigned i = vectors * vector_elements + threadIdx.x; i < count; i += threads)
      from_float(to_float(from[i]) * scale, to[i]);
  };
  if constexpr (pack)
    move(bucket, tensor);
  else
    move(tensor, bucket);
}

thread_local std::string last_error;

int fail(cudaError_t code, const std::string& reason) {
  last_error = reason;
  return code;
}

struct Call {
  const char* name;
  void* bucket;
  std::size_t bucket_count;
  DType bucket_dtype;
  const PackSegment* segments;
  std::size_t segment_count;
  DType tensor_dtype;
  float scale;
  cudaStream_t stream;
};

bool supports(DType dtype) { return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16; }

bool is_misaligned(const void* pointer, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(pointer) % size_bytes(dtype) != 0;
}

// Empty where the call is good.
std::string mistake(const Call& call) {
  if (!supports(call.bucket_dtype) || !supports(call.tensor_dtype))
    return "the data type must be float32, float16 or bfloat16; cast the tensors first";
  if (!call.segments && call.segment_count > 0) return "segments is null but segment_count is not 0";
  for (std::size_t i = 0; i < call.segment_count; ++i) {
    const PackSegment& segment = call.segments[i];
    const std::string which = "segment " + std::to_string(i);
    if (segment.count > call.bucket_count || segment.bucket_offset > call.bucket_count - segment.count)
      return which + " (offset " + std::to_string(segment.bucket_offset) + ", count " + std::to_string(segment.count) +
             ") ends beyond the bucket of " + std::to_string(call.bucket_count) + " elements";
    if (segment.count == 0) continue;
    if (!segment.tensor || !call.bucket) return which + " is not empty, but its tensor or the bucket is null";
    if (is_misaligned(segment.tensor, call.tensor_dtype) || is_misaligned(call.bucket, call.bucket_dtype))
      return which + ": the tensor and the bucket must be aligned to the size of their elements";
  }
  return {};
}

template <typename Tensor, typename Bucket, bool pack>
cudaError_t launch(const Call& call) {
  Batch batch{};
  unsigned chunks = 0;
  const auto flush = [&] {
    if (chunks == 0) return cudaSuccess;
    auto* bucket = static_cast<Bucket*>(call.bucket);
    void* arguments[] = {&batch, &bucket, const_cast<float*>(&call.scale)};
    const cudaError_t code = cudaLaunchKernel(reinterpret_cast<const void*>(move_segments<Tensor, Bucket, pack>),
                                              dim3(chunks), dim3(threads), arguments, 0, call.stream);
    batch.segment_count = 0;
    chunks = 0;
    return code;
  };
  for (std::size_t i = 0; i < call.segment_count; ++i) {
    const PackSegment& segment = call.segments[i];
    if (segment.count == 0) continue;
    const int slot = batch.segment_count++;
    batch.tensor[slot] = static_cast<char*>(segment.tensor);
    batch.count[slot] = segment.count;
    batch.bucket_offset[slot] = segment.bucket_offset;
    batch.first_chunk[slot] = chunks;
    chunks += static_cast<unsigned>((segment.count + chunk_elements - 1) / chunk_elements);
    if (batch.segment_count == max_segments)
      if (const cudaError_t code = flush(); code != cudaSuccess) return code;
  }
  return flush();
}

template <bool pack, typename Tensor>
cudaError_t launch(const Call& call) {
  if (call.bucket_dtype == DType::float16) return launch<Tensor, __half, pack>(call);
  if (call.bucket_dtype == DType::bfloat16) return launch<Tensor, __nv_bfloat16, pack>(call);
  return launch<Tensor, float, pack>(call);
}

template <bool pack>
int run(const Call& call) try {
  if (const std::string reason = mistake(call); !reason.empty())
    return fail(cudaErrorInvalidValue, std::string(call.name) + ": " + reason);
  const cudaError_t code = call.tensor_dtype == DType::float16    ? launch<pack, __half>(call)
                           : call.tensor_dtype == DType::bfloat16 ? launch<pack, __nv_bfloat16>(call)
                                                                  : launch<pack, float>(call);
  if (code == cudaSuccess) return 0;
  cudaGetLastError();  // not to be found by an unrelated later call
  return fail(code, std::string(call.name) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
} catch (const std::bad_alloc&) {
  return cudaErrorMemoryAllocation;  // of an error text
}

}  // namespace
}  // namespace holmes

#define HOLMES_API __attribute__((visibility("default")))

extern "C" {

HOLMES_API int holmes_cuda_pack(void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                                const holmes::PackSegment* segments, std::size_t segment_count,
                                holmes::DType tensor_dtype, float scale, void* stream) {
  return holmes::run<true>({"holmes_cuda_pack", bucket, bucket_count, bucket_dtype, segments, segment_count,
                            tensor_dtype, scale, static_cast<cudaStream_t>(stream)});
}

HOLMES_API int holmes_cuda_unpack(const void* bucket, std::size_t bucket_count, holmes::DType bucket_dtype,
                                  const holmes::PackSegment* segments, std::size_t segment_count,
                                  holmes::DType tensor_dtype, float scale, void* stream) {
  return holmes::run<false>({"holmes_cuda_unpack", const_cast<void*>(bucket), bucket_count, bucket_dtype, segments,
                             segment_count, tensor_dtype, scale, static_cast<cudaStream_t>(stream)});
}

HOLMES_API const char* holmes_cuda_last_error() { return holmes::last_error.c_str(); }
}
