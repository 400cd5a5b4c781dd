#include "kernels/launch.hpp"
#include "kernels/squared_norm.hpp"

namespace holmes::kernels {
namespace {

constexpr unsigned warp_threads = 32;

// The sum of every thread's `value`, in thread 0, in a fixed order.
__device__ double sum_of_block(double value) {
  __shared__ double warps[block_threads / warp_threads];
  for (unsigned distance = warp_threads / 2; distance > 0; distance /= 2)
    value += __shfl_down_sync(0xffffffff, value, distance);
  if (threadIdx.x % warp_threads == 0) warps[threadIdx.x / warp_threads] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (const double warp : warps) sum += warp;
  return sum;
}

// Block b puts (the first launch) or adds its sum to partial[b].
template <typename T>
__global__ void __launch_bounds__(block_threads, least_blocks)
    square_kernel(const __grid_constant__ NormBatch batch, double* partial, bool is_first) {
  double sum = 0;
  for (unsigned chunk = blockIdx.x; chunk < batch.table.chunks; chunk += norm_blocks)
    sum += square_chunk<T>(Thread{threadIdx.x, block_threads}, chunk, batch);
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = is_first ? sum : partial[blockIdx.x] + sum;
}

__global__ void __launch_bounds__(block_threads, least_blocks) finish_kernel(const double* partial, double* result) {
  double sum = 0;
  for (unsigned i = threadIdx.x; i < norm_blocks; i += block_threads) sum += partial[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) *result = sum;
}

template <typename Kernel>
cudaError_t launch_fixed(Kernel* kernel, unsigned blocks, void** arguments, void* stream) {
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(block_threads), arguments, 0, static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace holmes::kernels

using holmes::DType;
using holmes::NormTensor;

extern "C" {

HOLMES_API std::size_t holmes_cuda_norm_workspace_count() { return holmes::kernels::norm_blocks; }

HOLMES_API int holmes_cuda_squared_norm(double* result, double* workspace, const NormTensor* tensors,
                                        std::size_t tensor_count, DType dtype, void* stream) {
  using namespace holmes::kernels;
  std::string mistake;
  if (!supports(dtype))
    mistake = dtype_rule;
  else if (!result || !workspace)
    mistake = "the result or the workspace is null";
  for (std::size_t i = 0; i < tensor_count && mistake.empty(); ++i)
    if (tensors[i].count > 0 && (!tensors[i].tensor || is_misaligned(tensors[i].tensor, dtype)))
      mistake = "tensor " + std::to_string(i) + " is null or not aligned to the size of its elements";
  return run("holmes_cuda_squared_norm", mistake, [&] {
    return with_type(dtype, [&](auto element) {
      bool is_first = true;
      cudaError_t code = norm_in_batches(tensors, tensor_count, cudaSuccess, [&](NormBatch& batch) {
        void* arguments[] = {&batch, &workspace, &is_first};
        const auto kernel = square_kernel<decltype(element)>;
        // Every block has to write the first time.
        const unsigned blocks = is_first || batch.table.chunks > norm_blocks ? norm_blocks : batch.table.chunks;
        const cudaError_t launched = launch_fixed(kernel, blocks, arguments, stream);
        is_first = false;
        return launched;
      });
      if (code != cudaSuccess) return code;
      void* arguments[] = {&workspace, &result};
      return launch_fixed(finish_kernel, 1, arguments, stream);
    });
  });
}
}
