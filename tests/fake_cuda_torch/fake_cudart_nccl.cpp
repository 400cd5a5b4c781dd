// What NCCL's host half calls of the CUDA runtime beside what torch does (fake_cudart.cpp). Of its kernels
// nccl_kernels.cpp has the one for sends and receives; the launch of another is refused, when NCCL has connected.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "fake_kernels.hpp"

// nccl_kernels.cpp, where NCCL's sources are at hand.
[[gnu::weak]] bool fake_nccl_launch(const char* name, const void* arguments, std::size_t bytes, void* stream);

extern "C" {
CUresult cuGetErrorString(CUresult status, const char** text) { return cuGetErrorName(status, text); }
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

// --- devices ---
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* bus) {
  unsigned domain = 0, index = 0;
  if (std::sscanf(bus, "%x:%x:", &domain, &index) != 2) return cudaErrorInvalidValue;
  *device = static_cast<int>(index);
  return cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(cudaLimit, std::size_t) { return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorPeerAccessUnsupported; }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  // The legacy stream has two names.
  *id = stream == cudaStreamLegacy ? 0 : reinterpret_cast<unsigned long long>(stream);
  return cudaSuccess;
}

// --- memory: a pool is the allocator ---
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  static int only = 0;
  *pool = reinterpret_cast<cudaMemPool_t>(&only);
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** memory, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  if (const cudaError_t status = cudaStreamSynchronize(stream); status != cudaSuccess) return status;
  return cudaFree(memory);
}
// Ordinary memory is the device's too: streams are threads.
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }

// --- what only captures and the copy engine's collectives use ---
cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t*, const cudaGraphNode_t*,
                                     const cudaGraphEdgeData*, std::size_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, std::size_t,
                                        cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, std::size_t,
                                                unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaMemcpyBatchAsync(void* const*, const void* const*, const std::size_t*, std::size_t,
                                 cudaMemcpyAttributes*, std::size_t*, std::size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

// --- kernels ---
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = static_cast<cudaFunction_t>(const_cast<void*>(symbol));
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
// extra: pairs of a name and a value, with the arguments' address and their size's.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void** extra) {
  const char* const name = fake_kernels::name_of(function);
  if (fake_nccl_launch == nullptr || name == nullptr) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  const std::size_t bytes = *static_cast<std::size_t*>(extra[3]);
  return fake_nccl_launch(name, extra[1], bytes, config->hStream) ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}
}
