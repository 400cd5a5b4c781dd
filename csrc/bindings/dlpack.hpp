// DLPack (https://dmlc.github.io/dlpack): memory of any array library. The structures are its stable C ABI.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/bind_buffer.hpp"

namespace holmes {

// The memory behind object.__dlpack__(): of the host, or of the GPU `use.device`. Throws UsageError naming `use.what`
// and the reason. A GPU's memory is asked for ready on the legacy default stream.
Buffer from_dlpack(const pybind11::handle& object, const BufferUse& use);

}  // namespace holmes
