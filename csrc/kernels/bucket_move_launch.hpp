// The host's part of moving tensors to and from a bucket: what is allowed, and what goes into which launch.
#pragma once

#include <string>

#include "kernels/bucket_move.hpp"
#include "kernels/interface.hpp"

namespace holmes::kernels {

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
