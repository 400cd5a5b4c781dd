// libholmes_cuda as it is used: opened by its path (the argument). Without a GPU only its errors can be tested.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/interface.hpp"

namespace {

using holmes::DType;
using holmes::PackSegment;

int failures = 0;
decltype(&holmes_cuda_pack) pack;
decltype(&holmes_cuda_unpack) unpack;
decltype(&holmes_cuda_last_error) last_error;

void expect(bool good, const char* what) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s (last error: %s)\n", what, last_error());
}

void expect_refused(int code, const char* reason) {
  expect(code == cudaErrorInvalidValue && std::strstr(last_error(), reason), reason);
}

void test_mistakes() {
  alignas(16) float memory[8];
  const PackSegment good{memory, 4, 0}, beyond{memory, 4, 5}, empty{nullptr, 4, 0};
  const PackSegment misaligned{reinterpret_cast<char*>(memory) + 1, 1, 0};
  const auto f32 = DType::float32;
  expect_refused(pack(memory, 8, f32, &beyond, 1, f32, 1, nullptr), "beyond the bucket of 8");
  expect_refused(unpack(memory, 8, f32, &empty, 1, f32, 1, nullptr), "is null");
  expect_refused(pack(memory, 8, f32, nullptr, 1, f32, 1, nullptr), "segments is null");
  expect_refused(pack(memory, 8, f32, &misaligned, 1, f32, 1, nullptr), "aligned");
  expect_refused(pack(memory, 8, DType::int32, &good, 1, f32, 1, nullptr), "float32, float16 or bfloat16");
  expect(pack(nullptr, 0, f32, nullptr, 0, f32, 1, nullptr) == 0, "packing nothing");
}

void test_no_gpu(cudaError_t reason) {
  alignas(16) float memory[8];
  const PackSegment segment{memory, 4, 0};
  const int code = pack(memory, 8, DType::float32, &segment, 1, DType::float32, 1, nullptr);
  expect(code == reason && std::strstr(last_error(), cudaGetErrorString(reason)), "a clear error without GPU");
}

template <typename T>
T* device_memory(std::size_t count) {
  T* memory = nullptr;
  expect(cudaMallocManaged(&memory, count * sizeof(T)) == cudaSuccess, "cudaMallocManaged");
  return memory;
}

// 300 float32 tensors of odd sizes, some misaligned for vectors, into a bfloat16 bucket and back.
void test_round_trip() {
  std::vector<PackSegment> segments;
  std::size_t total = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    const std::size_t count = i % 7 == 0 ? 0 : i % 50 == 1 ? 20000 + i : i * 8;
    segments.push_back({device_memory<float>(count + 1) + i % 2, count, total});
    total += count;
  }
  auto* bucket = device_memory<__nv_bfloat16>(total);
  const auto value = [](std::size_t at) { return float(at % 4001) / 7 - 200; };
  for (const PackSegment& segment : segments)
    for (std::size_t i = 0; i < segment.count; ++i)
      static_cast<float*>(segment.tensor)[i] = value(segment.bucket_offset + i);
  cudaStream_t stream;
  expect(cudaStreamCreate(&stream) == cudaSuccess, "cudaStreamCreate");
  const auto f32 = DType::float32, bf16 = DType::bfloat16;
  expect(pack(bucket, total, bf16, segments.data(), segments.size(), f32, 0.25f, stream) == 0, "pack");
  expect(cudaStreamSynchronize(stream) == cudaSuccess, "pack ran");
  bool good = true;
  for (std::size_t i = 0; i < total; ++i)
    good = good && __bfloat162float(bucket[i]) == __bfloat162float(__float2bfloat16_rn(value(i) * 0.25f));
  expect(good, "packed values");
  expect(unpack(bucket, total, bf16, segments.data(), segments.size(), f32, 2, stream) == 0, "unpack");
  expect(cudaStreamSynchronize(stream) == cudaSuccess, "unpack ran");
  for (const PackSegment& segment : segments)
    for (std::size_t i = 0; i < segment.count; ++i)
      good = good && static_cast<float*>(segment.tensor)[i] == 2 * __bfloat162float(bucket[segment.bucket_offset + i]);
  expect(good, "unpacked values");
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) {
    std::printf("cannot open the library: %s\n", argc > 1 ? dlerror() : "give its path");
    return 1;
  }
  pack = reinterpret_cast<decltype(pack)>(dlsym(library, "holmes_cuda_pack"));
  unpack = reinterpret_cast<decltype(unpack)>(dlsym(library, "holmes_cuda_unpack"));
  last_error = reinterpret_cast<decltype(last_error)>(dlsym(library, "holmes_cuda_last_error"));
  test_mistakes();
  int devices = 0;
  const cudaError_t reason = cudaGetDeviceCount(&devices);
  if (reason == cudaSuccess && devices > 0) {
    test_round_trip();
  } else {
    std::printf("no GPU (%s): the kernels were not run\n", cudaGetErrorString(reason));
    test_no_gpu(reason);
  }
  std::printf("%d failed\n", failures);
  return failures ? 1 : 0;
}
