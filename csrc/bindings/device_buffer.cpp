// A GPU's memory behind a Python object, and the stream on which it is ready.
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bind_buffer.hpp"
#include "bindings/torch_tensor.hpp"
#include "holmes/core/error.hpp"
#include "holmes/cuda/device.hpp"

namespace py = pybind11;

namespace holmes {
namespace {

// Objects whose last user was a thread of the engine. Such a thread must not wait for Python's lock: an interpreter
// that ends would kill it there. They are dropped by the interpreter when it gets to it, or with the next buffer.
class Leftovers {
public:
  void add(PyObject* object) {
    {
      std::lock_guard lock(mutex_);
      objects_.push_back(object);
    }
    Py_AddPendingCall(
        [](void* leftovers) {
          static_cast<Leftovers*>(leftovers)->drop();
          return 0;
        },
        this);
  }
  // The caller holds Python's lock.
  void drop() {
    std::vector<PyObject*> objects;
    {
      std::lock_guard lock(mutex_);
      objects.swap(objects_);
    }
    for (PyObject* object : objects) Py_DECREF(object);
  }

private:
  std::mutex mutex_;
  std::vector<PyObject*> objects_;
};

Leftovers& leftovers() {
  static auto* const made = new Leftovers();
  return *made;
}

std::shared_ptr<void> hold(const py::handle& object) {
  leftovers().drop();
  object.inc_ref();
  return {object.ptr(), [](void* pointer) {
            if (Py_IsInitialized()) leftovers().add(static_cast<PyObject*>(pointer));
          }};
}

void* as_stream(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

Buffer from_torch(const py::handle& object, const BufferUse& use) {
  const TorchTensor tensor(object, use.what);
  if (tensor.gpu() != use.device)
    refuse_buffer(use.what, object,
                  "it lives on device '" + tensor.device() + "', this communicator moves the memory of 'cuda:" +
                      std::to_string(*use.device) + "'; move it there");
  static const py::handle current_stream =
      py::module_::import("torch").attr("_C").attr("_cuda_getCurrentRawStream").cast<py::object>().release();
  Buffer buffer = tensor.memory();
  buffer.owner = hold(tensor.storage());
  buffer.device = use.device;
  buffer.stream = as_stream(current_stream(*use.device).cast<std::uintptr_t>());
  return buffer;
}

// The stream of the library that made the array: its current one, as its operations run there.
void* stream_of(const py::handle& array, const py::dict& interface) {
  const auto module = py::str(py::type::handle_of(array).attr("__module__")).cast<std::string>();
  if (module.starts_with("cupy"))
    return as_stream(py::module_::import("cupy.cuda").attr("get_current_stream")().attr("ptr").cast<std::uintptr_t>());
  // 1: the legacy default stream, 2: the thread's; the driver has the same numbers. None: nothing to wait for.
  if (interface.contains("stream") && !interface["stream"].is_none())
    return as_stream(interface["stream"].cast<std::uintptr_t>());
  return nullptr;
}

Buffer from_cuda_array_interface(const py::handle& array, const BufferUse& use) {
  const auto interface = array.attr("__cuda_array_interface__").cast<py::dict>();
  const auto [address, read_only] = interface["data"].cast<std::pair<std::uintptr_t, bool>>();
  const auto typestr = interface["typestr"].cast<std::string>();
  if (typestr.size() < 3) refuse_buffer(use.what, array, "typestr '" + typestr + "' is none");
  const py::ssize_t item_bytes = std::stol(typestr.substr(2));
  const char kind = typestr[1];
  // The buffer protocol's letters.
  const std::string format = kind == 'b'   ? "?"
                             : kind == 'i' ? "l"
                             : kind == 'u' ? (item_bytes == 1 ? "B" : "L")
                             : kind == 'c' ? (item_bytes == 8 ? "Zf" : "Zd")
                             : kind == 'f' ? (item_bytes == 2   ? "e"
                                              : item_bytes == 4 ? "f"
                                                                : "d")
                                           : typestr;
  const DType dtype = dtype_of_format(use.what, array, (typestr[0] == '>' ? ">" : "") + format, item_bytes);
  if (use.writable && read_only) refuse_buffer(use.what, array, "its memory is read-only");
  std::size_t count = 1;
  const auto shape = interface["shape"].cast<py::tuple>();
  for (const auto& extent : shape) count *= extent.cast<std::size_t>();
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    const auto strides = interface["strides"].cast<py::tuple>();
    std::size_t expected = size_bytes(dtype);
    for (std::size_t i = shape.size(); i-- > 0;) {
      if (shape[i].cast<std::size_t>() != 1 && strides[i].cast<py::ssize_t>() != static_cast<py::ssize_t>(expected))
        refuse_buffer(use.what, array, "it is not contiguous; make a contiguous copy");
      expected *= shape[i].cast<std::size_t>();
    }
  }
  if (count > 0 && cuda::device_of(as_stream(address)) != use.device)
    refuse_buffer(use.what, array,
                  "it is not in the memory of GPU " + std::to_string(*use.device) + ", which this communicator moves");
  Buffer buffer{as_stream(address), count, dtype, hold(array)};
  buffer.device = use.device;
  buffer.stream = stream_of(array, interface);
  return buffer;
}

}  // namespace

std::optional<int> gpu_of(const py::handle& object) {
  if (PyObject_HasAttrString(object.ptr(), "__cuda_array_interface__")) {
    const auto interface = object.attr("__cuda_array_interface__").cast<py::dict>();
    const auto address = interface["data"].cast<std::pair<std::uintptr_t, bool>>().first;
    return address == 0 ? 0 : cuda::device_of(as_stream(address));  // without elements it is anywhere
  }
  if (PyObject_HasAttrString(object.ptr(), "__dlpack_device__")) {
    constexpr int dlpack_cuda = 2;
    const auto device = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    if (device.first == dlpack_cuda) return device.second;
  }
  return std::nullopt;
}

Buffer to_device_buffer(const py::handle& object, const BufferUse& use) {
  if (is_torch_tensor(object)) return from_torch(object, use);
  if (PyObject_HasAttrString(object.ptr(), "__cuda_array_interface__")) return from_cuda_array_interface(object, use);
  if (PyObject_HasAttrString(object.ptr(), "__dlpack__")) return from_dlpack(object, use);
  refuse_buffer(use.what, object,
                "no array in a GPU's memory; pass a torch CUDA tensor, a cupy array, or an object with "
                "__cuda_array_interface__ or DLPack");
}

}  // namespace holmes
