// DLPack (https://dmlc.github.io/dlpack): host memory of any array library. The structures are its stable C ABI.
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/core/types.hpp"

namespace holmes {

// The host memory behind object.__dlpack__(). Throws UsageError naming `what` and the reason.
Buffer from_dlpack(const pybind11::handle& object, const char* what);

}  // namespace holmes
