#include "bindings/bind_buffer.hpp"

#include <pybind11/numpy.h>

#include <optional>
#include <string>

#include "bindings/held_object.hpp"
#include "bindings/torch_tensor.hpp"
#include "holmes/core/error.hpp"

namespace py = pybind11;

namespace holmes {
namespace {

std::shared_ptr<void> keep_alive(const py::handle& object) {
  object.inc_ref();
  return held_by_work(object.ptr(), [](void* held) { Py_DECREF(static_cast<PyObject*>(held)); });
}

}  // namespace

void refuse_buffer(const char* what, const py::handle& object, const std::string& reason) {
  const std::string type = py::str(py::type::handle_of(object).attr("__name__"));
  throw UsageError(std::string(what) + " (" + type + "): " + reason);
}

namespace {

// numpy's letter for the kind of numbers that a format of the buffer protocol stands for; 'V': none of those below.
char kind_of(const std::string& format) {
  const auto has_any = [&](const char* letters) { return format.find_first_of(letters) != std::string::npos; };
  if (format.empty() || has_any("TX&{(")) return 'V';
  if (has_any("Z")) return 'c';
  if (has_any("O")) return 'O';
  if (has_any("HILQN")) return 'u';
  if (has_any("g")) return 'f';
  return has_any("swu") ? 'S' : 'V';
}

// What to pass in place of an array whose elements are of a kind (numpy's letter) that is not supported.
std::string way_out(const py::handle& object, char kind, py::ssize_t item_bytes) {
  const bool is_array = py::isinstance<py::array>(object) || py::hasattr(object, "__cuda_array_interface__");
  const std::string array = is_array ? "array" : "numpy.asarray(array)";
  const auto bits = std::to_string(8 * item_bytes);
  switch (kind) {
    case 'c':
      return "pass " + array + ".view(numpy.float" + std::to_string(4 * item_bytes) +
             "), its real and imaginary parts, whose sums are those of the numbers";
    case 'u':
      return "pass " + array + ".view(numpy.int" + bits +
             "), whose bits and sums are the same ('min' and 'max' need a conversion), or where it is only moved " +
             array + ".view(numpy.uint8)";
    case 'M':
    case 'm':
      return "pass " + array + ".view(numpy.int64), its ticks";
    case 'f':
      return "pass " + array + ".astype(numpy.float64)";
    case 'O':
      return "its elements are Python objects: convert it to numbers, or send what pickle.dumps makes of it as bytes";
    default:
      return "what is only moved may be viewed as one: " + array + ".view(numpy.uint8)";
  }
}

}  // namespace

DType dtype_of_format(const char* what, const py::handle& object, const std::string& format, py::ssize_t item_bytes) {
  char code = format.empty() ? 'B' : format.back();
  // One letter, perhaps behind a byte order; more is a structure, a complex number, ...
  const std::string byte_orders = "@=<|>!";
  if (format.size() > 2 || (format.size() == 2 && byte_orders.find(format.front()) == std::string::npos)) code = '\0';
  if (format.size() > 1 && (format.front() == '>' || format.front() == '!'))
    refuse_buffer(what, object,
                  "big-endian data (format '" + format +
                      "'); convert it to the machine's byte order: array.astype(array.dtype.newbyteorder('='))");
  const std::string signed_codes = "bhilqn";
  const std::string unsigned_bytes = "Bc";
  if (code == '?') return DType::boolean;
  if (code && unsigned_bytes.find(code) != std::string::npos) return DType::uint8;
  if (code == 'e') return DType::float16;
  if (code == 'f') return DType::float32;
  if (code == 'd') return DType::float64;
  if (code && signed_codes.find(code) != std::string::npos) {
    switch (item_bytes) {
      case 1:
        return DType::int8;
      case 2:
        return DType::int16;
      case 4:
        return DType::int32;
      case 8:
        return DType::int64;
    }
  }
  refuse_buffer(what, object,
                "dtype with format '" + format + "' is not supported; use one of " + supported_dtypes + "; " +
                    way_out(object, kind_of(format), item_bytes));
}

namespace {

std::shared_ptr<void> owner_of(const py::handle& object, const BufferUse& use) {
  return use.outlives_call ? keep_alive(object) : nullptr;
}

// numpy's type numbers (NPY_TYPES), which its ABI fixes.
std::optional<DType> dtype_of_numpy(int type_number) {
  switch (type_number) {
    case 0:
      return DType::boolean;
    case 1:
      return DType::int8;
    case 2:
      return DType::uint8;
    case 3:
      return DType::int16;
    case 5:
      return DType::int32;
    case 7:
      return sizeof(long) == 8 ? DType::int64 : DType::int32;
    case 9:
      return DType::int64;
    case 11:
      return DType::float32;
    case 12:
      return DType::float64;
    case 23:
      return DType::float16;
    default:
      return std::nullopt;
  }
}

// numpy's masked arrays have memory behind the mask that stands for nothing.
void check_not_masked(const py::handle& object, const char* what) {
  static const py::handle ndarray = py::module_::import("numpy").attr("ndarray").cast<py::object>().release();
  if (py::type::handle_of(object).ptr() == ndarray.ptr() || !py::hasattr(object, "filled")) return;
  refuse_buffer(what, object, "masked arrays are not supported; pass array.filled(value) or array.data");
}

// Without the buffer protocol, which writes a format string for every export. Absent where that has to decide (rare
// types, or an array that is to be refused).
std::optional<Buffer> from_numpy(const py::handle& object, const BufferUse& use) {
  if (!py::isinstance<py::array>(object)) return std::nullopt;
  check_not_masked(object, use.what);
  const auto array = py::reinterpret_borrow<py::array>(object);
  const py::dtype type = array.dtype();
  const auto dtype = dtype_of_numpy(type.num());
  const bool is_plain = (array.flags() & py::array::c_style) && (!use.writable || array.writeable());
  if (!dtype || !is_plain || type.byteorder() == '>') return std::nullopt;
  return Buffer{const_cast<void*>(array.data()), static_cast<std::size_t>(array.size()), *dtype, owner_of(object, use)};
}

// torch is asked through its own attributes: no DLPack capsule, and the lowest latency.
Buffer from_torch(const py::handle& object, const BufferUse& use) {
  const TorchTensor tensor(object, use.what);
  if (!tensor.is_cpu()) {
    if (use.any_gpu && tensor.gpu()) {
      BufferUse there = use;
      there.device = tensor.gpu();
      return to_device_buffer(object, there);
    }
    refuse_buffer(use.what, object,
                  "it lives on device '" + tensor.device() +
                      "', this communicator moves host memory; use a CPU tensor (tensor.cpu())");
  }
  Buffer buffer = tensor.memory();
  if (use.outlives_call) buffer.owner = keep_alive(tensor.storage());
  return buffer;
}

// "ValueError: what it says", in one line. Clears the error.
std::string raised_text() {
  const py::error_already_set error;
  const std::string text = py::str(error.value());
  return std::string(py::str(error.type().attr("__name__"))) + ": " + text.substr(0, text.find('\n'));
}

Buffer from_buffer_protocol(const py::handle& object, const char* what, bool writable) {
  auto view = std::make_unique<Py_buffer>();
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), view.get(), flags) != 0) {
    const std::string raised = raised_text();
    if (writable && PyObject_GetBuffer(object.ptr(), view.get(), flags & ~PyBUF_WRITABLE) == 0) {
      PyBuffer_Release(view.get());
      refuse_buffer(what, object, "its memory is read-only; pass a writable array");
    }
    PyErr_Clear();
    std::string fix = "pass one of a supported dtype";
    if (py::isinstance<py::array>(object)) {
      const py::dtype type = py::reinterpret_borrow<py::array>(object).dtype();
      const char kind = type.kind();
      if (kind == 'M' || kind == 'm' || kind == 'V') fix = way_out(object, kind, type.itemsize());
    }
    refuse_buffer(what, object, "it gives no access to its memory as a plain array (" + raised + "); " + fix);
  }
  const bool contiguous = PyBuffer_IsContiguous(view.get(), 'C') != 0;
  std::shared_ptr<void> owner = held_by_work(view.get(), [](void* pointer) {
    auto* held = static_cast<Py_buffer*>(pointer);
    PyBuffer_Release(held);
    delete held;
  });
  const Py_buffer& held = *view.release();
  if (!contiguous)
    refuse_buffer(what, object,
                  "it is not contiguous; pass numpy.ascontiguousarray(array), a copy: a result lands there");
  const DType dtype = dtype_of_format(what, object, held.format ? held.format : "B", held.itemsize);
  return {held.buf, static_cast<std::size_t>(held.len) / size_bytes(dtype), dtype, std::move(owner)};
}

Buffer read_buffer(const py::handle& object, const BufferUse& use) {
  if (use.device) return to_device_buffer(object, use);
  if (auto buffer = from_numpy(object, use)) return std::move(*buffer);
  if (is_torch_tensor(object)) return from_torch(object, use);
  const bool is_class = PyType_Check(object.ptr());  // has its objects' attributes
  if (use.any_gpu && !is_class) {
    BufferUse there = use;
    there.device = gpu_of(object);
    if (there.device) return to_device_buffer(object, there);
  }
  if (PyObject_CheckBuffer(object.ptr())) return from_buffer_protocol(object, use.what, use.writable);
  if (!PyType_Check(object.ptr()) && PyObject_HasAttrString(object.ptr(), "__dlpack__"))
    return from_dlpack(object, use);
  refuse_buffer(use.what, object,
                "not a tensor or array; pass a torch tensor, a numpy array, or an object with DLPack or the buffer "
                "protocol");
}

}  // namespace

Buffer to_buffer(const py::handle& object, const BufferUse& use) {
  try {
    return read_buffer(object, use);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt, ...
    error.restore();
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, "one of its attributes is of another type than it must be");
  }
  refuse_buffer(use.what, object,
                "reading its memory raised " + raised_text() +
                    "; pass a plain tensor or array that holds its values (tensor.detach().clone() of a wrapped one)");
}

}  // namespace holmes
