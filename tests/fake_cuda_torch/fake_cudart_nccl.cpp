// What NCCL's host half calls of the CUDA runtime beside what torch does (fake_cudart.cpp). No kernel runs: a launch is
// refused, so an operation ends with an error once NCCL has made the connections that it needs.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

extern "C" {
int cuGetErrorName(int status, const char** name);

int cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }
int cuDeviceGetUuid_v2(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  uuid[0] = static_cast<char>(device);
  return cudaSuccess;
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
int cuLaunchKernelEx(const void*, void*, void**, void**) { return cudaErrorNoKernelImageForDevice; }
}
