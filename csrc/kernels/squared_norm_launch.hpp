// The host's part of the squared norm: what goes into which launch.
#pragma once

#include "kernels/interface.hpp"
#include "kernels/squared_norm_chunk.hpp"

namespace holmes::kernels {

// As in_batches of bucket_move_launch.hpp; calls launch(batch) once at least, also where there is nothing to sum.
template <typename Code, typename Launch>
Code norm_in_batches(const NormTensor* tensors, std::size_t tensor_count, Code success, Launch launch) {
  NormBatch batch{};
  bool is_launched = false;
  for (std::size_t i = 0; i < tensor_count; ++i) {
    if (tensors[i].count == 0) continue;
    const int slot = batch.table.add(tensors[i].count);
    batch.tensor[slot] = static_cast<const char*>(tensors[i].tensor);
    batch.count[slot] = tensors[i].count;
    batch.weight[slot] = tensors[i].weight;
    if (batch.table.count < max_norm_tensors) continue;
    if (const Code code = launch(batch); code != success) return code;
    is_launched = true;
    batch.table.count = 0;
    batch.table.chunks = 0;
  }
  return batch.table.count > 0 || !is_launched ? launch(batch) : success;
}

}  // namespace holmes::kernels
