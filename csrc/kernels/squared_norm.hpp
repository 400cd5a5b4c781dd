// The squared norm: what one thread adds for its part of a chunk, and the host's part: what goes into which launch.
#pragma once

#include "kernels/chunks.hpp"
#include "kernels/interface.hpp"

namespace holmes::kernels {

constexpr int max_norm_tensors = 128;
// Fixed, so that the order of additions, and with it every bit of the sum, is the same on every GPU.
constexpr unsigned norm_blocks = 1024;

// One launch, passed by value.
struct NormBatch {
  const char* tensor[max_norm_tensors];
  std::size_t count[max_norm_tensors];
  float weight[max_norm_tensors];
  ChunkTable<max_norm_tensors> table;
};
static_assert(sizeof(NormBatch) <= argument_bytes);

// Of one vector: in float32 where nothing is lost (too large, too small or not finite), else in float64.
template <typename T>
HOLMES_KERNEL_CODE double squares(const Vector<T> in) {
  float sum = 0;
  HOLMES_UNROLL
  for (unsigned k = 0; k < vector_elements; ++k) sum += to_float(in.element[k]) * to_float(in.element[k]);
  if (sum > 1e-25f && sum < 1e37f) return sum;
  double exact = 0;
  HOLMES_UNROLL
  for (unsigned k = 0; k < vector_elements; ++k) {
    const double value = to_float(in.element[k]);
    exact += value * value;
  }
  return exact;
}

// The part of `thread` in the weighted sum of squares of a chunk. Not finite where an element is not.
template <typename T>
HOLMES_KERNEL_CODE double square_chunk(Thread thread, unsigned chunk, const NormBatch& batch) {
  const int tensor = batch.table.tensor_of(chunk);
  const std::size_t begin = batch.table.begin_of(chunk, tensor);
  const unsigned count = chunk_count(begin, batch.count[tensor]);
  const T* from = reinterpret_cast<const T*>(batch.tensor[tensor]) + begin;
  const Cut parts = cut(from, from, count);
  double sum = 0;
  HOLMES_UNROLL_4
  for (unsigned v = thread.index; v < parts.vectors; v += thread.count)
    sum += squares(load_vector(from + parts.head + v * vector_elements));
  const auto add_one = [&](unsigned i) {
    const double value = to_float(from[i]);
    sum += value * value;
  };
  for (unsigned i = thread.index; i < parts.head; i += thread.count) add_one(i);
  for (unsigned i = parts.head + parts.vectors * vector_elements + thread.index; i < count; i += thread.count)
    add_one(i);
  return sum * batch.weight[tensor];
}

// As in_batches of bucket_move.hpp; calls launch(batch) once at least, also where there is nothing to sum.
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
