#include "kernels/interface.hpp"
#include "kernels/launch.hpp"
#include "kernels/shard_sum_chunk.hpp"

namespace holmes::kernels {
namespace {

template <typename Output, typename Input>
__global__ void __launch_bounds__(block_threads, least_blocks)
    sum_kernel(const __grid_constant__ ShardBatch batch, Output* output, std::size_t count, float scale) {
  for (std::size_t begin = std::size_t{blockIdx.x} * chunk_elements; begin < count;
       begin += std::size_t{gridDim.x} * chunk_elements)
    sum_chunk<Output, Input>(Thread{threadIdx.x, block_threads}, begin, chunk_count(begin, count), batch, output,
                             scale);
}

}  // namespace
}  // namespace holmes::kernels

using holmes::DType;

extern "C" HOLMES_API int holmes_cuda_sum_shards(void* output, DType output_dtype, const void* const* shards,
                                                 std::size_t shard_count, DType shard_dtype, std::size_t count,
                                                 float scale, void* stream) {
  using namespace holmes::kernels;
  std::string mistake;
  if (!supports(output_dtype) || !supports(shard_dtype)) {
    mistake = dtype_rule;
  } else if (shard_count < 1 || shard_count > max_shards) {
    mistake = std::to_string(shard_count) + " shards; give 1 to " + std::to_string(max_shards);
  } else {
    for (std::size_t s = 0; s < shard_count && mistake.empty() && count > 0; ++s)
      if (!shards[s] || is_misaligned(shards[s], shard_dtype))
        mistake = "shard " + std::to_string(s) + " is null or not aligned to the size of its elements";
    if (count > 0 && (!output || is_misaligned(output, output_dtype)))
      mistake = "the output is null or not aligned to the size of its elements";
  }
  return run("holmes_cuda_sum_shards", mistake, [&] {
    if (count == 0) return cudaSuccess;
    ShardBatch batch{};
    batch.shards = static_cast<int>(shard_count);
    for (std::size_t s = 0; s < shard_count; ++s) batch.shard[s] = static_cast<const char*>(shards[s]);
    return with_type(output_dtype, [&](auto to) {
      return with_type(shard_dtype, [&](auto from) {
        using Output = decltype(to);
        return launch<sum_kernel<Output, decltype(from)>>(chunks_of(count), stream, batch, static_cast<Output*>(output),
                                                          count, scale);
      });
    });
  });
}
