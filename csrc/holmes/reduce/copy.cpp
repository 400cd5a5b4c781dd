#include "holmes/reduce/copy.hpp"

#include <cstring>

#include "holmes/reduce/kernels.hpp"

namespace holmes {
namespace {

// Below, the call of memcpy is the cheaper one.
constexpr std::size_t min_kernel_bytes = 2048;

const KernelSet& best_kernels() {
  static const KernelSet& best = *supported_kernels().front();
  return best;
}

}  // namespace

void copy_stream(void* destination, const void* source, std::size_t bytes, bool non_temporal) {
  if (bytes == 0) return;  // the pointers may be null
  if (non_temporal)
    best_kernels().copy_non_temporal(destination, source, bytes);
  else
    copy_cached(destination, source, bytes);
}

void copy_cached(void* destination, const void* source, std::size_t bytes) {
  if (bytes >= min_kernel_bytes)
    best_kernels().copy(destination, source, bytes);
  else if (bytes > 0)
    std::memcpy(destination, source, bytes);
}

}  // namespace holmes
