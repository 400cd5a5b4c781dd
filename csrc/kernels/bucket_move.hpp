// Moving tensors to and from a bucket: what one thread does for a chunk, and the host's part: what is allowed, and what
// goes into which launch.
#pragma once

#include <string>

#include "kernels/chunks.hpp"
#include "kernels/interface.hpp"

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
  constexpr unsigned under_way = adds ? vectors_under_way / 2 : vectors_under_way;  // of each of the two
  for (unsigned first = thread.index; first < parts.vectors; first += under_way * thread.count) {
    Vector<From> in[under_way];
    Vector<To> out[under_way];
    HOLMES_UNROLL
    for (unsigned i = 0; i < under_way; ++i) {
      const unsigned at = first + i * thread.count;
      if (at >= parts.vectors) break;
      in[i] = load_vector(from + parts.head + at * vector_elements);
      if constexpr (adds) out[i] = load_vector(to + parts.head + at * vector_elements);
    }
    HOLMES_UNROLL
    for (unsigned i = 0; i < under_way; ++i) {
      const unsigned at = first + i * thread.count;
      if (at >= parts.vectors) break;
      HOLMES_UNROLL
      for (unsigned k = 0; k < vector_elements; ++k) move(in[i].element[k], out[i].element[k]);
      store_vector(to + parts.head + at * vector_elements, out[i]);
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

// What is wrong with the segments; empty where nothing is.
inline std::string mistake_in(const void* bucket, std::size_t bucket_count, std::size_t bucket_element_bytes,
                              const PackSegment* segments, std::size_t segment_count,
                              std::size_t tensor_element_bytes) {
  const auto is_misaligned = [](const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0;
  };
  if (!segments && segment_count > 0) return "segments is null but segment_count is not 0";
  for (std::size_t i = 0; i < segment_count; ++i) {
    const PackSegment& segment = segments[i];
    const std::string which = "segment " + std::to_string(i);
    if (segment.count > bucket_count || segment.bucket_offset > bucket_count - segment.count)
      return which + " (offset " + std::to_string(segment.bucket_offset) + ", count " + std::to_string(segment.count) +
             ") ends beyond the bucket of " + std::to_string(bucket_count) + " elements";
    if (segment.count == 0) continue;
    if (!segment.tensor || !bucket) return which + " is not empty, but its tensor or the bucket is null";
    if (is_misaligned(segment.tensor, tensor_element_bytes) || is_misaligned(bucket, bucket_element_bytes))
      return which + ": the tensor and the bucket must be aligned to the size of their elements";
  }
  return {};
}

// Calls launch(batch) for all segments, as many in one as it holds, until it returns something else than `success`,
// which is returned then.
template <typename Code, typename Launch>
Code in_batches(const PackSegment* segments, std::size_t segment_count, Code success, Launch launch) {
  MoveBatch batch{};
  for (std::size_t i = 0; i < segment_count; ++i) {
    const PackSegment& segment = segments[i];
    if (segment.count == 0) continue;
    const int slot = batch.table.add(segment.count);
    batch.tensor[slot] = static_cast<char*>(segment.tensor);
    batch.count[slot] = segment.count;
    batch.bucket_offset[slot] = segment.bucket_offset;
    if (batch.table.count < max_segments) continue;
    if (const Code code = launch(batch); code != success) return code;
    batch.table.count = 0;
    batch.table.chunks = 0;
  }
  return batch.table.count > 0 ? launch(batch) : success;
}

}  // namespace holmes::kernels
