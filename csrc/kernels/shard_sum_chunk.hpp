// What one thread does to sum a chunk of several shards.
#pragma once

#include "kernels/chunks.hpp"

namespace holmes::kernels {

constexpr int max_shards = 256;

// One launch, passed by value.
struct ShardBatch {
  const char* shard[max_shards];
  int shards;
};
static_assert(sizeof(ShardBatch) <= argument_bytes);

// output[i] = scale * (shard 0 [i] + shard 1 [i] + ...) for the chunk at `begin`, summed in float32, in this order.
template <typename Output, typename Input>
HOLMES_KERNEL_CODE void sum_chunk(Thread thread, std::size_t begin, unsigned count, const ShardBatch& batch,
                                  Output* __restrict__ output, float scale) {
  const auto shard = [&](int number) { return reinterpret_cast<const Input*>(batch.shard[number]) + begin; };
  output += begin;
  Cut parts = cut(output, shard(0), count);
  for (int s = 1; s < batch.shards && parts.vectors > 0; ++s)
    if (!is_aligned(shard(s) + parts.head)) parts = {count, 0};
  const auto sum_one = [&](unsigned i) {
    float sum = 0;
    for (int s = 0; s < batch.shards; ++s) sum += to_float(shard(s)[i]);
    from_float(sum * scale, output[i]);
  };
  for (unsigned v = thread.index; v < parts.vectors; v += thread.count) {
    const unsigned first = parts.head + v * vector_elements;
    float sum[vector_elements];
    HOLMES_UNROLL
    for (unsigned k = 0; k < vector_elements; ++k) sum[k] = 0;
    HOLMES_UNROLL_4
    for (int s = 0; s < batch.shards; ++s) {
      const Vector<Input> in = load_vector(shard(s) + first);
      HOLMES_UNROLL
      for (unsigned k = 0; k < vector_elements; ++k) sum[k] += to_float(in.element[k]);
    }
    Vector<Output> out;
    HOLMES_UNROLL
    for (unsigned k = 0; k < vector_elements; ++k) from_float(sum[k] * scale, out.element[k]);
    store_vector(output + first, out);
  }
  for (unsigned i = thread.index; i < parts.head; i += thread.count) sum_one(i);
  for (unsigned i = parts.head + parts.vectors * vector_elements + thread.index; i < count; i += thread.count)
    sum_one(i);
}

}  // namespace holmes::kernels
