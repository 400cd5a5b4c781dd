// DLPack (https://dmlc.github.io/dlpack): memory of any array library. The structures are its stable C ABI.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "holmes/core/types.hpp"

namespace holmes {

// The memory behind object.__dlpack__(): of the host, or of the GPU `device`. Throws UsageError naming `what` and the
// reason. A GPU's memory is asked for ready on the legacy default stream.
Buffer from_dlpack(const pybind11::handle& object, const char* what, std::optional<int> device = std::nullopt);

}  // namespace holmes
