// GPUDirect RDMA: HCAs that read and write a GPU's memory where it is.
#pragma once

#include <cstddef>
#include <string>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/env.hpp"
#include "holmes/cuda/device.hpp"

namespace holmes::cuda {

// What the GPU and its driver lack for it, and what to do; empty where they have all.
std::string missing_for_gpu_direct(const Device& device, GpuDirect way);

// A part of a GPU's memory for another device, in whole pages; `offset`: where in it `address` is. Without a descriptor
// where the driver refuses (then errno is set).
struct ExportedMemory {
  UniqueFd fd;
  std::size_t offset = 0;
};
ExportedMemory export_memory(const Device& device, const void* address, std::size_t bytes);

// What other devices have written by now is seen by what the GPU does from now on. Throws SystemError.
void flush_writes(const Device& device);

}  // namespace holmes::cuda
