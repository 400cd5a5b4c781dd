#include "holmes/cuda/driver.hpp"

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"

namespace holmes::cuda {
namespace {

std::unique_ptr<Driver> load() {
  const std::string path = Env::read().cuda_library.value_or("libcuda.so.1");
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = ::dlerror();
    throw UsageError("no CUDA driver: " + std::string(reason ? reason : path) +
                     "; use this on a machine with an NVIDIA GPU and its driver, or a communicator for host memory");
  }
  auto made = std::make_unique<Driver>();
  const auto resolve = [&]<class Function>(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle, symbol));
    if (function == nullptr) throw UsageError(path + " has no function " + symbol + "; update the NVIDIA driver");
  };
  resolve("cuInit", made->init);
  resolve("cuDeviceGetCount", made->device_get_count);
  resolve("cuDeviceGet", made->device_get);
  resolve("cuDeviceGetAttribute", made->device_get_attribute);
  resolve("cuDevicePrimaryCtxRetain", made->primary_context_retain);
  resolve("cuCtxGetCurrent", made->context_get_current);
  resolve("cuCtxSetCurrent", made->context_set_current);
  resolve("cuCtxGetStreamPriorityRange", made->stream_priority_range);
  resolve("cuStreamCreateWithPriority", made->stream_create);
  resolve("cuStreamDestroy_v2", made->stream_destroy);
  resolve("cuStreamWaitEvent", made->stream_wait_event);
  resolve("cuStreamGetCaptureInfo_v2", made->stream_get_capture_info);
  resolve("cuThreadExchangeStreamCaptureMode", made->exchange_capture_mode);
  resolve("cuStreamQuery", made->stream_query);
  resolve("cuEventCreate", made->event_create);
  resolve("cuEventDestroy_v2", made->event_destroy);
  resolve("cuEventRecord", made->event_record);
  resolve("cuEventQuery", made->event_query);
  resolve("cuMemAlloc_v2", made->memory_allocate);
  resolve("cuMemFree_v2", made->memory_free);
  resolve("cuMemcpyAsync", made->memory_copy);
  resolve("cuMemHostAlloc", made->host_memory_allocate);
  resolve("cuMemFreeHost", made->host_memory_free);
  resolve("cuMemcpyDtoHAsync_v2", made->copy_to_host);
  resolve("cuMemcpyHtoDAsync_v2", made->copy_to_device);
  resolve("cuLaunchHostFunc", made->launch_host_function);
  resolve("cuPointerGetAttribute", made->pointer_get_attribute);
  resolve("cuGetErrorName", made->get_error_name);
  const auto look_for = [&]<class Function>(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle, symbol));
  };
  look_for("cuMemGetHandleForAddressRange", made->memory_export);
  look_for("cuFlushGPUDirectRDMAWrites", made->flush_writes);
  int count = 0;
  if (made->init(0) != success || made->device_get_count(&count) != success || count == 0)
    throw UsageError("the CUDA driver " + path +
                     " finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use a communicator for host memory");
  return made;
}

}  // namespace

std::string Driver::describe(Status status) const {
  const char* name = nullptr;
  if (get_error_name(status, &name) != success || name == nullptr) name = "unknown CUDA error";
  return std::string(name) + " (" + std::to_string(status) + ")";
}

void Driver::check(Status status, const char* what) const {
  if (status != success) throw SystemError(std::string("cannot ") + what + ": " + describe(status));
}

const Driver& driver() {
  static std::mutex mutex;
  static Driver* loaded = nullptr;  // never destroyed: threads go on to the end of the process
  std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = load().release();
  return *loaded;
}

}  // namespace holmes::cuda
