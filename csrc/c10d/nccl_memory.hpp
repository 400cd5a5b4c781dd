// Memory that NCCL allocates, for torch's MemPool.
#pragma once

#include <cstddef>

namespace holmes::torch_backend {

// As torch's custom allocators want them. Null where there is no memory left.
void* allocate_nccl_memory(std::size_t bytes, int device, void* stream);
void free_nccl_memory(void* memory, std::size_t bytes, int device, void* stream);
// Throws UsageError where this process's NCCL cannot allocate (2.19 and later can).
void check_nccl_memory();

}  // namespace holmes::torch_backend
