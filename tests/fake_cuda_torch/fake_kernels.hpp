// The kernels of torch that the fake runtime knows: what fills, scales and adds. Others are refused by name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace fake_kernels {

struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};
inline thread_local Configuration pushed;  // by the <<<>>> of a launch

// `name`: the mangled one of the kernel that torch calls by this function's address.
void add(const void* host_function, const char* name);
// Null: nobody added it.
const char* name_of(const void* host_function);
// Puts it on the stream; cudaErrorNoKernelImageForDevice for a kernel that nothing here stands in for.
int launch(const void* host_function, void** arguments, cudaStream_t stream);

}  // namespace fake_kernels
