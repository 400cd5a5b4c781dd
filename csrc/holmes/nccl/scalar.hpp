// Scalar: a number as an element of a floating point type.
#pragma once

#include <cstddef>

#include "holmes/core/types.hpp"

namespace holmes::nccl {

class Scalar {
public:
  // Rounded to nearest even. `dtype`: floating point.
  Scalar(double value, DType dtype);
  void* data() { return bytes_; }

private:
  alignas(8) std::byte bytes_[8] = {};
};

}  // namespace holmes::nccl
