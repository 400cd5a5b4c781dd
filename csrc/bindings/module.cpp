// holmes_comm._C: the engine for Python.
#include <pybind11/numpy.h>

#include "bindings/bindings.hpp"

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
}
