#include "bindings/dlpack.hpp"

#include <optional>
#include <string>

#include "bindings/held_object.hpp"
#include "holmes/core/error.hpp"

namespace py = pybind11;

namespace holmes {
namespace {

struct DLDevice {
  std::int32_t device_type;  // 1: host, 3: pinned host
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 6 bool
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

std::optional<DType> dtype_of(DLDataType type) {
  if (type.lanes != 1) return std::nullopt;
  const auto is = [&](int code, int bits) { return type.code == code && type.bits == bits; };
  if (is(2, 64)) return DType::float64;
  if (is(2, 32)) return DType::float32;
  if (is(2, 16)) return DType::float16;
  if (is(4, 16)) return DType::bfloat16;
  if (is(0, 8)) return DType::int8;
  if (is(0, 16)) return DType::int16;
  if (is(0, 32)) return DType::int32;
  if (is(0, 64)) return DType::int64;
  if (is(1, 8)) return DType::uint8;
  if (is(6, 8)) return DType::boolean;
  return std::nullopt;
}

bool is_contiguous(const DLTensor& tensor) {
  if (!tensor.strides) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

Buffer from_dlpack(const py::handle& object, const char* what, std::optional<int> gpu) {
  const auto refuse = [&](const std::string& reason) -> void { throw UsageError(std::string(what) + ": " + reason); };
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  constexpr int host = 1;
  constexpr int cuda = 2;
  constexpr int pinned_host = 3;
  if (gpu ? device != std::pair(cuda, *gpu) : device.first != host && device.first != pinned_host)
    refuse("it lives on DLPack device type " + std::to_string(device.first) + ", number " +
           std::to_string(device.second) + "; this communicator moves " +
           (gpu ? "the memory of GPU " + std::to_string(*gpu) : "host memory") + ": copy it there first");
  constexpr int legacy_default_stream = 1;  // as DLPack counts
  const py::object capsule =
      gpu ? object.attr("__dlpack__")(py::arg("stream") = legacy_default_stream) : object.attr("__dlpack__")();
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (!managed) throw py::error_already_set();
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  std::shared_ptr<void> owner = held_by_work(managed, [](void* pointer) {
    auto* held = static_cast<DLManagedTensor*>(pointer);
    if (held->deleter) held->deleter(held);
  });
  const DLTensor& tensor = managed->tensor;
  const auto dtype = dtype_of(tensor.dtype);
  if (!dtype)
    refuse("DLPack dtype (code " + std::to_string(tensor.dtype.code) + ", " + std::to_string(tensor.dtype.bits) +
           " bits) is not supported");
  if (!is_contiguous(tensor)) refuse("it is not contiguous; make a contiguous copy");
  std::size_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= static_cast<std::size_t>(tensor.shape[i]);
  return {static_cast<std::byte*>(tensor.data) + tensor.byte_offset, count, *dtype, std::move(owner), gpu};
}

}  // namespace holmes
