// Driver: the functions of the CUDA driver that Holmes calls, found at run time. No CUDA is needed to build.
#pragma once

#include <cstddef>
#include <string>

namespace holmes::cuda {

using Status = int;  // CUresult
inline constexpr Status success = 0;
inline constexpr Status deinitialized = 4;  // the process ends, the driver has shut down
inline constexpr Status not_ready = 600;

using Context = void*;  // CUcontext
using Stream = void*;   // CUstream, the same as cudaStream_t; null: the legacy default stream
using Event = void*;    // CUevent
using Address = unsigned long long;

// Plain data; the driver is thread-safe.
struct Driver {
  Status (*init)(unsigned flags) = nullptr;
  Status (*device_get_count)(int* count) = nullptr;
  Status (*device_get)(int* device, int ordinal) = nullptr;
  Status (*device_get_attribute)(int* value, int attribute, int device) = nullptr;
  Status (*primary_context_retain)(Context* context, int device) = nullptr;
  Status (*context_get_current)(Context* context) = nullptr;
  Status (*context_set_current)(Context context) = nullptr;
  Status (*stream_priority_range)(int* least, int* greatest) = nullptr;
  Status (*stream_create)(Stream* stream, unsigned flags, int priority) = nullptr;
  Status (*stream_destroy)(Stream stream) = nullptr;
  Status (*stream_wait_event)(Stream stream, Event event, unsigned flags) = nullptr;
  // cuStreamGetCaptureInfo_v2; what follows `id` may be null.
  Status (*stream_get_capture_info)(Stream stream, int* status, unsigned long long* id, void** graph,
                                    const void** dependencies, std::size_t* count) = nullptr;
  Status (*exchange_capture_mode)(int* mode) = nullptr;  // of this thread
  Status (*stream_query)(Stream stream) = nullptr;
  Status (*event_create)(Event* event, unsigned flags) = nullptr;
  Status (*event_destroy)(Event event) = nullptr;
  Status (*event_record)(Event event, Stream stream) = nullptr;
  Status (*event_query)(Event event) = nullptr;
  Status (*memory_allocate)(Address* address, std::size_t bytes) = nullptr;
  Status (*memory_free)(Address address) = nullptr;
  Status (*memory_copy)(Address to, Address from, std::size_t bytes, Stream stream) = nullptr;
  Status (*host_memory_allocate)(void** memory, std::size_t bytes, unsigned flags) = nullptr;
  Status (*host_memory_free)(void* memory) = nullptr;
  Status (*copy_to_host)(void* to, Address from, std::size_t bytes, Stream stream) = nullptr;
  Status (*copy_to_device)(Address to, const void* from, std::size_t bytes, Stream stream) = nullptr;
  // `function` runs in a thread of the driver and must not call the driver.
  Status (*launch_host_function)(Stream stream, void (*function)(void* argument), void* argument) = nullptr;
  Status (*pointer_get_attribute)(void* value, int attribute, Address address) = nullptr;
  // Null where the driver is older: cuMemGetHandleForAddressRange, cuFlushGPUDirectRDMAWrites.
  Status (*memory_export)(void* handle, Address address, std::size_t bytes, int kind,
                          unsigned long long flags) = nullptr;
  Status (*flush_writes)(int target, int scope) = nullptr;
  Status (*get_error_name)(Status status, const char** name) = nullptr;

  // "CUDA_ERROR_OUT_OF_MEMORY (2)".
  std::string describe(Status status) const;
  // Throws SystemError "cannot `what`: ..." where `status` is no success.
  void check(Status status, const char* what) const;
};

// The driver of HOLMES_CUDA_LIBRARY, else libcuda.so.1, initialised. Throws UsageError where there is none (no GPU on
// this machine, or no driver in this container) or it finds no device. Thread-safe.
const Driver& driver();

}  // namespace holmes::cuda
