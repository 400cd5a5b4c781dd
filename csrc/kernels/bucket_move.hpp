// What one thread does to move a chunk of a tensor to or from its place in the bucket.
#pragma once

#include "kernels/chunks.hpp"

namespace holmes::kernels {

enum class Move { pack, unpack, accumulate };

constexpr int max_segments = 128;

// One launch, passed by value.
struct MoveBatch {
  char* tensor[max_segments];
  std::size_t count[max_segments];
  std::size_t bucket_offset[max_segments];
  ChunkTable<max_segments> table;
};
static_assert(sizeof(MoveBatch) <= argument_bytes);

// to[i] = from[i] * scale, or added to what is there, for the whole chunk by all threads together.
template <bool adds, typename To, typename From>
HOLMES_KERNEL_CODE void move_chunk(Thread thread, To* __restrict__ to, const From* __restrict__ from, unsigned count,
                                   float scale) {
  const auto move = [scale](const From& in, To& out) {
    float value = to_float(in) * scale;
    if constexpr (adds) value += to_float(out);
    from_float(value, out);
  };
  const Cut parts = cut(to, from, count);
  const auto* sources = reinterpret_cast<const Vector<From>*>(from + parts.head);
  auto* targets = reinterpret_cast<Vector<To>*>(to + parts.head);
  for (unsigned first = thread.index; first < parts.vectors; first += vectors_under_way * thread.count) {
    Vector<From> in[vectors_under_way];
    Vector<To> out[vectors_under_way];
    HOLMES_UNROLL
    for (unsigned i = 0; i < vectors_under_way; ++i) {
      const unsigned at = first + i * thread.count;
      if (at >= parts.vectors) break;
      in[i] = sources[at];
      if constexpr (adds) out[i] = targets[at];
    }
    HOLMES_UNROLL
    for (unsigned i = 0; i < vectors_under_way; ++i) {
      const unsigned at = first + i * thread.count;
      if (at >= parts.vectors) break;
      HOLMES_UNROLL
      for (unsigned k = 0; k < vector_elements; ++k) move(in[i].element[k], out[i].element[k]);
      targets[at] = out[i];
    }
  }
  for (unsigned i = thread.index; i < parts.head; i += thread.count) move(from[i], to[i]);
  for (unsigned i = parts.head + parts.vectors * vector_elements + thread.index; i < count; i += thread.count)
    move(from[i], to[i]);
}

template <Move kind, typename Tensor, typename Bucket>
HOLMES_KERNEL_CODE void move_in_batch(Thread thread, unsigned chunk, const MoveBatch& batch, Bucket* bucket,
                                      float scale) {
  const int segment = batch.table.tensor_of(chunk);
  const std::size_t begin = batch.table.begin_of(chunk, segment);
  const unsigned count = chunk_count(begin, batch.count[segment]);
  Tensor* tensor = reinterpret_cast<Tensor*>(batch.tensor[segment]) + begin;
  bucket += batch.bucket_offset[segment] + begin;
  if constexpr (kind == Move::unpack)
    move_chunk<false>(thread, tensor, bucket, count, scale);
  else
    move_chunk<kind == Move::accumulate>(thread, bucket, tensor, count, scale);
}

}  // namespace holmes::kernels
