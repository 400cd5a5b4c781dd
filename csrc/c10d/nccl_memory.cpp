#include "nccl_memory.hpp"

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/cuda/device.hpp"
#include "holmes/nccl/api.hpp"

namespace holmes::torch_backend {

void check_nccl_memory() {
  const nccl::Api& api = nccl::stock_library().api;
  if (api.memory_allocate == nullptr)
    throw UsageError("NCCL " + nccl::version_text(api.version) +
                     " cannot allocate memory; use 2.19 or later, or a MemPool without an allocator");
}

void* allocate_nccl_memory(std::size_t bytes, int device, void* /*stream*/) {
  void* memory = nullptr;
  try {
    const nccl::Api& api = nccl::stock_library().api;
    const cuda::CurrentDevice current(cuda::Device::get(device));
    if (const nccl::Result result = api.memory_allocate(&memory, bytes); result != nccl::success) {
      log(LogLevel::warn, std::nullopt,
          "NCCL cannot allocate " + std::to_string(bytes) + " bytes: " + api.describe(result));
      return nullptr;
    }
  } catch (const HolmesError& error) {
    log(LogLevel::warn, std::nullopt, std::string("NCCL cannot allocate memory: ") + error.what());
    return nullptr;
  }
  return memory;
}

void free_nccl_memory(void* memory, std::size_t /*bytes*/, int device, void* /*stream*/) {
  try {
    const cuda::CurrentDevice current(cuda::Device::get(device));
    nccl::stock_library().api.memory_free(memory);
  } catch (const HolmesError& error) {
    log(LogLevel::warn, std::nullopt, std::string("NCCL cannot free memory: ") + error.what());
  }
}

}  // namespace holmes::torch_backend
