// The CUDA runtime without a GPU, on the fake driver (../fake_nccl): for torch's CUDA build, whose own code then runs
// as it is. Kernels do not, except the few that fake_kernels.cpp stands in for.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fake_cuda.hpp"
#include "fake_kernels.hpp"

extern "C" {
int cuInit(unsigned flags);
int cuDeviceGetCount(int* count);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuCtxSynchronize();
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamDestroy_v2(void* stream);
int cuStreamQuery(void* stream);
int cuStreamSynchronize(void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
int cuStreamIsCapturing(void* stream, int* status);
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void**, const void**, std::size_t*);
int cuStreamBeginCapture_v2(void* stream, int mode);
int cuStreamEndCapture(void* stream, void** graph);
int cuThreadExchangeStreamCaptureMode(int* mode);
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags);
int cuGraphGetNodes(void* graph, void** nodes, std::size_t* count);
int cuGraphLaunch(void* graph, void* stream);
int cuGraphDestroy(void* graph);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventRecord(void* event, void* stream);
int cuEventQuery(void* event);
int cuEventSynchronize(void* event);
int cuEventElapsedTime(float* milliseconds, void* begin, void* end);
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes);
int cuMemFree_v2(unsigned long long address);
int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned flags);
int cuMemFreeHost(void* memory);
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t bytes, void* stream);
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, void* stream);
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream);
int cuMemsetD8Async(unsigned long long to, unsigned char value, std::size_t bytes, void* stream);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
int cuPointerGetAttribute(void* value, int attribute, unsigned long long address);
int cuGetErrorName(int status, const char** name);
}

namespace {

constexpr int version = 13000;
constexpr std::size_t memory_bytes = std::size_t{64} << 30;
constexpr int pci_domain = 0xfa;  // one in which this machine has nothing
constexpr int multiprocessors_attribute = 16, ordinal_attribute = 9;

thread_local cudaError_t last_error = cudaSuccess;

// The runtime's numbers of errors are the driver's.
cudaError_t returned(int status) {
  if (status != 0) last_error = static_cast<cudaError_t>(status);
  return static_cast<cudaError_t>(status);
}

unsigned long long address_of(const void* memory) { return reinterpret_cast<unsigned long long>(memory); }
bool is_on_device(const void* memory) {
  int device = 0;
  return cuPointerGetAttribute(&device, ordinal_attribute, address_of(memory)) == 0;
}

// The runtime makes a device's context a thread's current one with its first call there.
void need_context() {
  if (!fake_cuda_has_context()) cudaSetDevice(0);
}

// As the runtime: memory that is not page-locked is copied away at once, or waited for.
cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  need_context();
  const bool to_device = is_on_device(to), from_device = is_on_device(from);
  if (to_device && from_device) return returned(cuMemcpyAsync(address_of(to), address_of(from), bytes, stream));
  if (!to_device && !from_device) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  }
  if (to_device) {
    if (fake_cuda_is_pinned(from, bytes)) return returned(cuMemcpyHtoDAsync_v2(address_of(to), from, bytes, stream));
    if (fake_cuda_is_capturing(stream)) return returned(cudaErrorStreamCaptureUnsupported);
    const auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    fake_cuda_access(stream, to, bytes, true, "a copy from the host");
    fake_cuda_enqueue(stream, [to, staged] { std::memcpy(to, staged->data(), staged->size()); });
    return cudaSuccess;
  }
  if (fake_cuda_is_pinned(to, bytes)) return returned(cuMemcpyDtoHAsync_v2(to, address_of(from), bytes, stream));
  if (fake_cuda_is_capturing(stream)) return returned(cudaErrorStreamCaptureUnsupported);
  fake_cuda_access(stream, from, bytes, false, "a copy to the host");
  fake_cuda_enqueue(stream, [=] { std::memcpy(to, from, bytes); });
  return returned(cuStreamSynchronize(stream));
}

// What a function that the driver has not says when it is called.
int not_supported() {
  std::fprintf(stderr, "fake CUDA: a function of the driver was called that nothing here stands in for\n");
  return cudaErrorNotSupported;
}

}  // namespace

extern "C" {

// --- devices ---
cudaError_t cudaGetDeviceCount(int* count) {
  cuInit(0);
  return returned(cuDeviceGetCount(count));
}
cudaError_t cudaGetDevice(int* device) {
  const FakeCall call("cuCtxGetCurrent");  // what the driver has to be asked
  *device = fake_cuda_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  const FakeCall call("cuCtxSetCurrent");
  int count = 0;
  cuDeviceGetCount(&count);
  if (device < 0 || device >= count) return returned(cudaErrorInvalidDevice);
  void* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, device);
  return returned(cuCtxSetCurrent(context));
}
cudaError_t cudaDeviceSynchronize() { return returned(cuCtxSynchronize()); }
cudaError_t cudaDriverGetVersion(int* found) {
  *found = version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* found) {
  *found = version;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "Fake GPU %d", device);
  properties->uuid.bytes[0] = static_cast<char>(device);
  properties->major = 9;
  properties->totalGlobalMem = memory_bytes;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->regsPerMultiprocessor = properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = properties->sharedMemPerMultiprocessor = 48 << 10;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->maxGridSize[0] = properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = properties->maxThreadsDim[2] = 1024;
  properties->pciDomainID = pci_domain;
  properties->pciBusID = device;
  properties->l2CacheSize = 1 << 20;
  return returned(cuDeviceGetAttribute(&properties->multiProcessorCount, multiprocessors_attribute, device));
}
// Features that it has not are 0.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  if (const auto status = cudaGetDeviceProperties(&properties, device); status != cudaSuccess) return status;
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? properties.major
           : attribute == cudaDevAttrMultiProcessorCount          ? properties.multiProcessorCount
           : attribute == cudaDevAttrMaxThreadsPerBlock           ? properties.maxThreadsPerBlock
           : attribute == cudaDevAttrMaxThreadsPerMultiProcessor  ? properties.maxThreadsPerMultiProcessor
           : attribute == cudaDevAttrWarpSize                     ? properties.warpSize
           : attribute == cudaDevAttrMaxSharedMemoryPerBlock      ? static_cast<int>(properties.sharedMemPerBlock)
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? static_cast<int>(properties.sharedMemPerBlockOptin)
                                                                  : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<std::size_t>(bytes), "%04x:%02x:00.0", pci_domain, device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// --- errors ---
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  const char* name = nullptr;
  cuGetErrorName(error, &name);
  return name;
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

// --- streams ---
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  need_context();
  return returned(cuStreamCreate(reinterpret_cast<void**>(stream), flags));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return returned(cuStreamDestroy_v2(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return returned(cuStreamQuery(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return returned(cuStreamSynchronize(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return returned(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return returned(cuLaunchHostFunc(stream, function, argument));
}

// --- capture and graphs ---
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  int found = 0;
  const int result = cuStreamIsCapturing(stream, &found);
  *status = static_cast<cudaStreamCaptureStatus>(found);
  return returned(result);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData**, std::size_t* count) {
  int found = 0;
  unsigned long long number = 0;
  const int result = cuStreamGetCaptureInfo_v2(stream, &found, &number, nullptr, nullptr, nullptr);
  if (id != nullptr) *id = number;
  // A name; nothing can be done with it, and its nodes are nobody's to see.
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(number);
  if (dependencies != nullptr) *dependencies = nullptr;
  if (count != nullptr) *count = 0;
  *status = static_cast<cudaStreamCaptureStatus>(found);
  return returned(result);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return returned(cuStreamBeginCapture_v2(stream, mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return returned(cuStreamEndCapture(stream, reinterpret_cast<void**>(graph)));
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  int exchanged = *mode;
  const int result = cuThreadExchangeStreamCaptureMode(&exchanged);
  *mode = static_cast<cudaStreamCaptureMode>(exchanged);
  return returned(result);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return returned(cuGraphInstantiateWithFlags(reinterpret_cast<void**>(executable), graph, flags));
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return returned(cuGraphGetNodes(graph, reinterpret_cast<void**>(nodes), count));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return returned(cuGraphLaunch(executable, stream));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return returned(cuGraphDestroy(graph)); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return returned(cuGraphDestroy(executable)); }

// --- events ---
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  need_context();
  return returned(cuEventCreate(reinterpret_cast<void**>(event), flags));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return returned(cuEventDestroy_v2(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return returned(cuEventRecord(event, stream)); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return returned(cuEventRecord(event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return returned(cuEventQuery(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return returned(cuEventSynchronize(event)); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return returned(cuEventElapsedTime(milliseconds, begin, end));
}

// --- memory ---
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  need_context();
  unsigned long long address = 0;
  const int status = cuMemAlloc_v2(&address, bytes);
  *memory = reinterpret_cast<void*>(address);
  return returned(status);
}
// Waits for the device, as the real one.
cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return need_context(), cudaSuccess;
  if (const int status = cuCtxSynchronize(); status != 0) return returned(status);
  return returned(cuMemFree_v2(address_of(memory)));
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = memory_bytes;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  need_context();
  return returned(cuMemHostAlloc(memory, bytes, flags));
}
cudaError_t cudaFreeHost(void* memory) { return returned(cuMemFreeHost(memory)); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  const cudaError_t status = copy(to, from, bytes, nullptr);
  return status == cudaSuccess ? returned(cuStreamSynchronize(nullptr)) : status;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return returned(cuMemsetD8Async(address_of(memory), static_cast<unsigned char>(value), bytes, stream));
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->device = -2;
  attributes->hostPointer = const_cast<void*>(memory);
  if (cuPointerGetAttribute(&attributes->device, ordinal_attribute, address_of(memory)) == 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(memory);
  } else if (fake_cuda_is_pinned(memory, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = 0;
  }
  return cudaSuccess;
}

// --- the driver's functions by name ---
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::string name = symbol;
  *function = ::dlsym(RTLD_DEFAULT, (name + "_v2").c_str());
  if (*function == nullptr) *function = ::dlsym(RTLD_DEFAULT, symbol);
  if (*function == nullptr) *function = reinterpret_cast<void*>(not_supported);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- kernels ---
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  fake_kernels::add(host_function, name);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream) {
  fake_kernels::pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes, void* stream) {
  *grid = fake_kernels::pushed.grid;
  *block = fake_kernels::pushed.block;
  *shared_bytes = fake_kernels::pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = fake_kernels::pushed.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* host_function, dim3, dim3, void** arguments, std::size_t,
                             cudaStream_t stream) {
  const FakeCall call("cuLaunchKernel");
  return returned(fake_kernels::launch(host_function, arguments, stream));
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared_bytes,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
}
