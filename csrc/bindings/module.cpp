// holmes_comm._C: the engine for Python.
#include <pybind11/numpy.h>

#include "bindings/bindings.hpp"

namespace {

// pybind11 gives an object that `__new__` alone has made memory that holds anything, where it is first looked at.
void refuse_unmade(const pybind11::module_& module) {
  for (const auto& [name, value] : module.attr("__dict__").cast<pybind11::dict>()) {
    if (!PyType_Check(value.ptr())) continue;
    auto* const info = pybind11::detail::get_type_info(reinterpret_cast<PyTypeObject*>(value.ptr()));
    if (!info) continue;  // an exception, say
    info->operator_new = [](std::size_t) -> void* {
      throw pybind11::type_error("this object was never made; a class of your own calls super().__init__() first");
    };
  }
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The Holmes engine: NIC discovery, stores and communicators. Use it through holmes_comm.";
  // Looks up numpy's functions, once: not in a call, in which the interpreter may end (see gil.hpp).
  pybind11::dtype::of<float>();
  bind_error(module);
  bind_options(module);
  bind_discover(module);
  bind_store(module);
  bind_shared_buffer(module);
  bind_work(module);
  bind_comm(module);
  bind_nccl(module);
  bind_nic_choice(module);
  bind_debug(module);
  refuse_unmade(module);
}
