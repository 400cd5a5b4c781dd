#include "device_stream.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/gil.hpp"

namespace holmes::torch_backend {
namespace {

// Older torch tells it to Python only.
template <class Guard>
void* native_stream_of(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    const c10::StreamGuard make_current(stream);
    const GilAcquire gil;
    const auto number = pybind11::module_::import("torch._C")
                            .attr("_cuda_getCurrentRawStream")(static_cast<int>(stream.device_index()));
    return reinterpret_cast<void*>(number.template cast<std::uintptr_t>());
  }
}

}  // namespace

void* native_stream(const c10::Stream& stream) {
  return native_stream_of(c10::impl::VirtualGuardImpl(stream.device_type()), stream);
}

void* current_stream(c10::Device device) {
  return native_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace holmes::torch_backend
