// How kernels are launched, and how a failure is told. CUDA only.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <new>
#include <string>

#include "holmes/core/types.hpp"
#include "kernels/chunks.hpp"

#define HOLMES_API __attribute__((visibility("default")))

namespace holmes::kernels {

// Sets what holmes_cuda_last_error returns in this thread; returns `code`.
int fail(cudaError_t code, const std::string& reason);

inline bool supports(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}
constexpr const char* dtype_rule = "the data type must be float32, float16 or bfloat16; cast the tensors first";

inline bool is_misaligned(const void* pointer, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(pointer) % size_bytes(dtype) != 0;
}

// Calls function(T{}) with the element type of a supported `dtype`.
template <typename Function>
auto with_type(DType dtype, Function function) {
  if (dtype == DType::float16) return function(Half{});
  if (dtype == DType::bfloat16) return function(BFloat16{});
  return function(float{});
}

// As many blocks of `kernel` as the current device runs at a time: each takes chunk after chunk.
template <auto kernel>
cudaError_t resident_blocks(unsigned& blocks) {
  constexpr int remembered_devices = 64;
  static std::array<std::atomic<unsigned>, remembered_devices> known{};
  int device = 0;
  if (const cudaError_t code = cudaGetDevice(&device); code != cudaSuccess) return code;
  const bool is_remembered = device < remembered_devices;
  if (is_remembered && (blocks = known[device].load(std::memory_order_relaxed)) > 0) return cudaSuccess;
  int processors = 0, per_processor = 0;
  cudaError_t code = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (code == cudaSuccess)
    code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, static_cast<int>(block_threads), 0);
  if (code != cudaSuccess) return code;
  blocks = static_cast<unsigned>(processors * (per_processor > 0 ? per_processor : 1));
  if (is_remembered) known[device].store(blocks, std::memory_order_relaxed);
  return cudaSuccess;
}

// Puts `kernel` on the stream, for `chunks` chunks.
template <auto kernel, typename... Arguments>
cudaError_t launch(unsigned chunks, void* stream, Arguments... arguments) {
  unsigned blocks = 0;
  if (const cudaError_t code = resident_blocks<kernel>(blocks); code != cudaSuccess) return code;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return cudaLaunchKernel(kernel, dim3(chunks < blocks ? chunks : blocks), dim3(block_threads), pointers, 0,
                          static_cast<cudaStream_t>(stream));
}

// Runs `body`, which returns a cudaError_t, after `mistake` (empty: none); tells what went wrong as function `name`.
template <typename Body>
int run(const char* name, const std::string& mistake, Body body) try {
  if (!mistake.empty()) return fail(cudaErrorInvalidValue, std::string(name) + ": " + mistake);
  const cudaError_t code = body();
  if (code == cudaSuccess) return 0;
  cudaGetLastError();  // not to be found by an unrelated later call
  return fail(code, std::string(name) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
} catch (const std::bad_alloc&) {
  return cudaErrorMemoryAllocation;  // of an error text
}

}  // namespace holmes::kernels
