// RingCopy: copies into memory that another processor core reads and that is written again and again, as a ring's is.
#pragma once

#include <cstddef>

#include "holmes/transport/shm/copy_tuning.hpp"

namespace holmes {

class RingCopy {
public:
  // memcpy; a release store after it publishes the copy. The regions must not overlap.
  void operator()(std::byte* destination, const void* source, std::size_t bytes);

private:
  StoreChoice choice_;
};

}  // namespace holmes
