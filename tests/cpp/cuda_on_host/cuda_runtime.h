// As much of the CUDA runtime as csrc/kernels asks for, on the host: a launch runs its blocks one after the other, each
// block's threads as fibers (fibers.hpp) that run until they meet a barrier. "Device" memory is the host's. The address
// sanitizer sees every access beyond memory; the thread sanitizer takes each fiber for a thread, so that what two of
// them access without a barrier in between is an error, whatever the order.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <type_traits>
#include <utility>

#include "fibers.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x;
  explicit dim3(unsigned count) : x(count) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
// Few, so that each block takes many chunks.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 3, cudaSuccess; }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, std::size_t) {
  return *blocks = 1, cudaSuccess;
}

#define threadIdx (on_host::this_thread())
#define blockIdx (on_host::this_block())
#define gridDim (on_host::this_grid())

inline void __syncthreads() { on_host::meet_block(); }

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  static_assert(sizeof(T) <= sizeof(double));
  if (mask != 0xffffffff) std::abort();
  return on_host::from_lane(value, on_host::this_thread().x % on_host::warp_threads + distance);
}

template <typename... Parameters, std::size_t... numbers>
void run_on_host(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, void** arguments,
                 std::index_sequence<numbers...>) {
  on_host::launch(blocks, threads,
                  [=] { kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[numbers])...); });
}

// HOLMES_KERNELS_ON_HOST=none: nothing runs, for who measures what comes before.
template <typename... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, void** arguments, std::size_t,
                             cudaStream_t) {
  static const bool is_off = std::getenv("HOLMES_KERNELS_ON_HOST") != nullptr;
  if (!is_off) run_on_host(kernel, blocks.x, threads.x, arguments, std::index_sequence_for<Parameters...>());
  return cudaSuccess;
}
