// Many tensors in one launch: each is cut into chunks, which the blocks take in turns. The host's side and the
// kernels'.
#pragma once

#include <cstddef>

#include "kernels/element.hpp"

namespace holmes::kernels {

constexpr unsigned block_threads = 256;
constexpr unsigned least_blocks = 4;       // in a multiprocessor at once: 64 registers a thread
constexpr unsigned vector_elements = 8;    // that a thread moves at once: 16 bytes of 16-bit elements
constexpr unsigned vectors_under_way = 4;  // that a thread has asked for at a time: hides the memory's latency
constexpr unsigned chunk_elements = block_threads * vector_elements * vectors_under_way;
constexpr std::size_t argument_bytes = 4000;  // kernel arguments are limited to 4 KiB

constexpr unsigned chunks_of(std::size_t count) {
  return static_cast<unsigned>((count + chunk_elements - 1) / chunk_elements);
}

// Which chunk belongs to which of `count` tensors.
template <int capacity>
struct ChunkTable {
  unsigned first_chunk[capacity];  // ascending
  unsigned chunks;
  int count;

  // The number of the tensor added. Room is the caller's business.
  int add(std::size_t elements) {
    first_chunk[count] = chunks;
    chunks += chunks_of(elements);
    return count++;
  }
  HOLMES_KERNEL_CODE int tensor_of(unsigned chunk) const {
    int tensor = 0;
    for (int end = count; end - tensor > 1;) {
      const int middle = (tensor + end) / 2;
      (first_chunk[middle] <= chunk ? tensor : end) = middle;
    }
    return tensor;
  }
  HOLMES_KERNEL_CODE std::size_t begin_of(unsigned chunk, int tensor) const {
    return static_cast<std::size_t>(chunk - first_chunk[tensor]) * chunk_elements;
  }
};

HOLMES_KERNEL_CODE inline unsigned chunk_count(std::size_t begin, std::size_t count) {
  return count - begin < chunk_elements ? static_cast<unsigned>(count - begin) : chunk_elements;
}

constexpr std::size_t vector_bytes = 16;

template <typename T>
struct alignas(vector_bytes) Vector {
  T element[vector_elements];
};

// 16 bytes at a time. Said so to nvcc, which makes single elements of a Vector that is assigned where it cannot see
// that nothing comes between (tests/gpu/test_sass.py).
template <typename T>
HOLMES_KERNEL_CODE Vector<T> load_vector(const T* from) {
#ifdef __CUDA_ARCH__
  constexpr unsigned words = sizeof(Vector<T>) / sizeof(uint4);
  uint4 raw[words];
  HOLMES_UNROLL
  for (unsigned i = 0; i < words; ++i) raw[i] = reinterpret_cast<const uint4*>(from)[i];
  Vector<T> vector;
  std::memcpy(&vector, raw, sizeof vector);
  return vector;
#else
  return *reinterpret_cast<const Vector<T>*>(from);
#endif
}

template <typename T>
HOLMES_KERNEL_CODE void store_vector(T* to, const Vector<T>& vector) {
#ifdef __CUDA_ARCH__
  constexpr unsigned words = sizeof(Vector<T>) / sizeof(uint4);
  uint4 raw[words];
  std::memcpy(raw, &vector, sizeof vector);
  HOLMES_UNROLL
  for (unsigned i = 0; i < words; ++i) __stwb(reinterpret_cast<uint4*>(to) + i, raw[i]);
#else
  *reinterpret_cast<Vector<T>*>(to) = vector;
#endif
}

HOLMES_KERNEL_CODE inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % vector_bytes == 0;
}

// Elements before the first one that is aligned for a vector (`pointer` is aligned to its elements).
template <typename T>
HOLMES_KERNEL_CODE unsigned elements_before_vector(const T* pointer) {
  const auto past = reinterpret_cast<std::uintptr_t>(pointer) % vector_bytes;
  return static_cast<unsigned>((vector_bytes - past) % vector_bytes / sizeof(T));
}

// How a chunk of two arrays is cut: `head` single elements, whole vectors of both, and the rest. No vectors where the
// two are never aligned together.
struct Cut {
  unsigned head;
  unsigned vectors;
};
template <typename A, typename B>
HOLMES_KERNEL_CODE Cut cut(const A* a, const B* b, unsigned count) {
  // The smaller elements decide: a vector of the larger ones may begin at more places.
  const unsigned head = sizeof(A) <= sizeof(B) ? elements_before_vector(a) : elements_before_vector(b);
  if (head >= count || !is_aligned(a + head) || !is_aligned(b + head)) return {count, 0};
  return {head, (count - head) / vector_elements};
}

}  // namespace holmes::kernels
