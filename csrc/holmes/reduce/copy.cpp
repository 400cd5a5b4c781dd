#include "holmes/reduce/copy.hpp"

#include <cstring>

#include "holmes/reduce/kernels.hpp"

namespace holmes {

void copy_stream(void* destination, const void* source, std::size_t bytes, bool non_temporal) {
  if (bytes == 0) return;  // the pointers may be null
  if (non_temporal)
    supported_kernels().front()->copy_non_temporal(destination, source, bytes);
  else
    std::memcpy(destination, source, bytes);
}

}  // namespace holmes
