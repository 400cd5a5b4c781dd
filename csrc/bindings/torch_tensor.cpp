#include "bindings/torch_tensor.hpp"

#include <string>
#include <unordered_map>

#include "bindings/bind_buffer.hpp"

namespace py = pybind11;

namespace holmes {
namespace {

// What is asked of every tensor. Interned, so that asking makes no strings.
struct Names {
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* layout = PyUnicode_InternFromString("layout");
  PyObject* is_nested = PyUnicode_InternFromString("is_nested");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
};

// torch's own objects, which live as long as the process.
struct Torch {
  PyTypeObject* tensor;
  PyTypeObject* parameter;
  PyObject* strided;
  std::unordered_map<PyObject*, DType> dtypes;  // torch.dtype objects are singletons
  Names names;
};

PyTypeObject* type_of(const py::object& type) { return reinterpret_cast<PyTypeObject*>(type.ptr()); }

const Torch* look_up_torch() {
  const py::object torch = py::reinterpret_steal<py::object>(PyImport_GetModule(py::str("torch").ptr()));
  // It may be in the middle of its import.
  if (!torch || !py::hasattr(torch, "nn") || !py::hasattr(torch.attr("nn"), "Parameter")) {
    PyErr_Clear();
    return nullptr;
  }
  auto* found = new Torch{type_of(torch.attr("Tensor")),
                          type_of(torch.attr("nn").attr("Parameter")),
                          py::object(torch.attr("strided")).release().ptr(),
                          {},
                          {}};
  for (int i = 0; i < dtype_count; ++i) {
    const auto dtype = static_cast<DType>(i);
    found->dtypes[torch.attr(std::string(name(dtype)).c_str()).ptr()] = dtype;
  }
  return found;
}

// Null before torch is imported.
const Torch* torch_if_imported() {
  static const Torch* found = nullptr;
  if (!found) found = look_up_torch();
  return found;
}

py::object checked(PyObject* value) {
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object get(const py::handle& object, PyObject* name) { return checked(PyObject_GetAttr(object.ptr(), name)); }

py::object call(const py::handle& object, PyObject* name) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), name));
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

std::size_t as_size(const py::object& value) {
  const std::size_t size = PyLong_AsSize_t(value.ptr());
  if (size == static_cast<std::size_t>(-1) && PyErr_Occurred()) throw py::error_already_set();
  return size;
}

std::string text_of(const py::handle& object) { return py::str(object); }

}  // namespace

bool is_torch_tensor(const py::handle& object) {
  const Torch* torch = torch_if_imported();
  return torch && PyType_IsSubtype(Py_TYPE(object.ptr()), torch->tensor);
}

TorchTensor::TorchTensor(const py::handle& tensor, const char* what) : tensor_(tensor), what_(what) {
  const Torch* torch = torch_if_imported();
  PyTypeObject* const type = Py_TYPE(tensor.ptr());
  if (type == torch->tensor || type == torch->parameter) return;
  torch_function_off_ = py::module_::import("torch").attr("_C").attr("DisableTorchFunctionSubclass")();
  torch_function_off_.attr("__enter__")();
}

TorchTensor::~TorchTensor() {
  if (!torch_function_off_) return;
  const py::error_scope keeps_the_error;
  py::reinterpret_steal<py::object>(
      PyObject_CallMethod(torch_function_off_.ptr(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  PyErr_Clear();
}

void TorchTensor::refuse(const std::string& reason) const { refuse_buffer(what_, tensor_, reason); }

bool TorchTensor::is_cpu() const { return is_true(get(tensor_, torch_if_imported()->names.is_cpu)); }

std::string TorchTensor::device() const { return text_of(tensor_.attr("device")); }

std::optional<int> TorchTensor::gpu() const {
  if (!is_true(tensor_.attr("is_cuda"))) return std::nullopt;
  return tensor_.attr("device").attr("index").cast<int>();
}

DType TorchTensor::dtype() const {
  const Torch& torch = *torch_if_imported();
  const py::object type = get(tensor_, torch.names.dtype);
  const auto found = torch.dtypes.find(type.ptr());
  if (found != torch.dtypes.end()) return found->second;
  const std::string name = text_of(type);
  const bool is_unsigned = name.starts_with("torch.uint") && type.attr("itemsize").cast<int>() > 1;
  std::string fix = "view it as torch.uint8 where it is only moved: tensor.view(torch.uint8)";
  if (is_true(type.attr("is_floating_point"))) fix += "; convert it where it is reduced: tensor.float()";
  if (is_unsigned)
    fix = "view it as torch." + name.substr(name.find("int")) +
          ", whose bits and sums are the same ('min' and 'max' need a conversion)";
  if (is_true(tensor_.attr("is_quantized"))) fix = "pass tensor.int_repr() or tensor.dequantize()";
  if (is_true(type.attr("is_complex"))) fix = "pass torch.view_as_real(tensor.resolve_conj())";
  refuse(name + " is not supported; " + fix);
}

void TorchTensor::check_form() const {
  const Torch& torch = *torch_if_imported();
  const Names& names = torch.names;
  const py::object layout = get(tensor_, names.layout);
  if (is_true(get(tensor_, names.is_nested)))
    refuse("nested tensors are not supported; pass tensor.values() or the tensors in it");
  if (layout.ptr() != torch.strided) {
    const std::string text = text_of(layout);
    const bool is_sparse = text.find("sparse") != std::string::npos;
    refuse((is_sparse ? "sparse tensors" : "tensors of another layout than strided") + (" (" + text + ")") +
           " are not supported; use to_dense()");
  }
  if (!is_true(call(tensor_, names.is_contiguous)))
    refuse("it is not contiguous (shape " + text_of(tensor_.attr("shape")) + ", strides " +
           text_of(tensor_.attr("stride")()) + "); pass tensor.contiguous(), a copy: a result lands there");
  if (is_true(call(tensor_, names.is_neg)))
    refuse("its memory holds the negatives of its values (its negative bit is set); pass tensor.resolve_neg()");
}

// The storage must hold the tensor: it may have been freed or shrunk, or be a subclass's that has none.
void* TorchTensor::checked_data(std::size_t bytes, std::size_t element_bytes) const {
  const Names& names = torch_if_imported()->names;
  const std::size_t held_bytes = as_size(call(call(tensor_, names.untyped_storage), names.nbytes));
  const std::size_t offset_bytes = as_size(call(tensor_, names.storage_offset)) * element_bytes;
  const std::size_t address = as_size(call(tensor_, names.data_ptr));
  if (bytes == 0) return reinterpret_cast<void*>(address);
  const std::size_t needed_bytes = offset_bytes + bytes;
  if (held_bytes < needed_bytes)
    refuse("its storage holds " + std::to_string(held_bytes) + " of the " + std::to_string(needed_bytes) +
           " bytes that it needs (it was freed or shrunk); pass it while it holds its values");
  if (address == offset_bytes)
    refuse(
        "it has no memory of its own; pass the plain tensor that it stands for (a DTensor's to_local(), the tensor "
        "inside a wrapper; a FakeTensor has none)");
  return reinterpret_cast<void*>(address);
}

py::object TorchTensor::storage() const { return call(tensor_, torch_if_imported()->names.untyped_storage); }

Buffer TorchTensor::memory() const {
  if (torch_function_off_ && py::hasattr(tensor_, "cls_to_become"))
    refuse("it is not initialized yet; run its lazy module once first");
  Buffer buffer;
  buffer.dtype = dtype();
  check_form();
  buffer.count = as_size(call(tensor_, torch_if_imported()->names.numel));
  buffer.data = checked_data(buffer.bytes(), size_bytes(buffer.dtype));
  return buffer;
}

}  // namespace holmes
