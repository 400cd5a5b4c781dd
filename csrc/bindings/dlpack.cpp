#include "bindings/bind_buffer.hpp"

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
// From version 1.0 on.
struct DLManagedTensorVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  std::uint64_t flags;  // 1: read-only
  DLTensor tensor;
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

std::size_t count_of(const DLTensor& tensor) {
  std::size_t count = 1;
  for (std::int32_t i = 0; i < tensor.ndim; ++i) count *= static_cast<std::size_t>(tensor.shape[i]);
  return count;
}

bool is_contiguous(const DLTensor& tensor) {
  if (!tensor.strides || count_of(tensor) == 0) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

constexpr int dl_host = 1;
constexpr int dl_cuda = 2;
constexpr int dl_pinned_host = 3;

// What an object's capsule holds, given back to it with the last `owner`.
struct Exported {
  const DLTensor* tensor;
  bool is_read_only;
  std::shared_ptr<void> owner;
};

template <typename Managed>
std::shared_ptr<void> owner_of(Managed* managed) {
  return held_by_work(managed, [](void* pointer) {
    auto* held = static_cast<Managed*>(pointer);
    if (held->deleter) held->deleter(held);
  });
}

template <typename Managed>
Managed* taken(const py::object& capsule, const char* name, const char* used_name) {
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (!managed || PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw py::error_already_set();
  return managed;
}

py::object capsule_of(const py::handle& object, bool is_gpu) {
  py::dict options;
  constexpr int legacy_default_stream = 1;  // as DLPack counts
  if (is_gpu) options["stream"] = legacy_default_stream;
  options["max_version"] = py::make_tuple(1, 0);
  try {
    return object.attr("__dlpack__")(**options);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // of before version 1.0
  }
  options.attr("pop")("max_version");
  return object.attr("__dlpack__")(**options);
}

Exported exported(const py::object& capsule, const BufferUse& use, const py::handle& object) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = taken<DLManagedTensorVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned");
    auto owner = owner_of(managed);
    constexpr std::uint32_t known_major = 1;
    if (managed->major != known_major)
      refuse_buffer(use.what, object, "its DLPack version is " + std::to_string(managed->major) + ", 1 is needed");
    return {&managed->tensor, (managed->flags & 1) != 0, std::move(owner)};
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor"))
    refuse_buffer(use.what, object,
                  "its __dlpack__ gives no unused DLPack capsule; give a new one for each call, or pass a numpy array");
  auto* managed = taken<DLManagedTensor>(capsule, "dltensor", "used_dltensor");
  return {&managed->tensor, false, owner_of(managed)};
}

void check_device(const py::handle& object, const BufferUse& use) {
  const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  const bool fits = use.device ? device == std::pair(dl_cuda, *use.device)
                               : device.first == dl_host || device.first == dl_pinned_host;
  if (fits) return;
  refuse_buffer(use.what, object,
                "it lives on DLPack device type " + std::to_string(device.first) + ", number " +
                    std::to_string(device.second) + "; this communicator moves " +
                    (use.device ? "the memory of GPU " + std::to_string(*use.device) : "host memory") +
                    ": copy it there first");
}

}  // namespace

Buffer from_dlpack(const py::handle& object, const BufferUse& use) {
  const auto refuse = [&](const std::string& reason) { refuse_buffer(use.what, object, reason); };
  check_device(object, use);
  const Exported memory = exported(capsule_of(object, use.device.has_value()), use, object);
  const DLTensor& tensor = *memory.tensor;
  const auto dtype = dtype_of(tensor.dtype);
  if (!dtype)
    refuse("DLPack dtype (code " + std::to_string(tensor.dtype.code) + ", " + std::to_string(tensor.dtype.bits) +
           " bits) is not supported; convert it to one of " + supported_dtypes);
  if (!is_contiguous(tensor)) refuse("it is not contiguous; make a contiguous copy");
  if (use.writable && memory.is_read_only) refuse("its memory is read-only; pass a writable array");
  const std::size_t count = count_of(tensor);
  if (count > 0 && !tensor.data) refuse("it has no memory; pass an array that holds its values");
  return {static_cast<std::byte*>(tensor.data) + tensor.byte_offset, count, *dtype, memory.owner, use.device};
}

}  // namespace holmes
