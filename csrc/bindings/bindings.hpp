// The parts of the module holmes_comm._C, one per concept, and what several of them take.
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/bootstrap/store.hpp"

void bind_debug(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_discover(pybind11::module_& module);
void bind_error(pybind11::module_& module);
void bind_nccl(pybind11::module_& module);
void bind_nic_choice(pybind11::module_& module);
void bind_options(pybind11::module_& module);
void bind_shared_buffer(pybind11::module_& module);
void bind_store(pybind11::module_& module);
void bind_work(pybind11::module_& module);

namespace holmes {

// Objects of `type` are neither copied nor pickled: TypeError says so, and `instead`.
template <typename Class>
void stays_in_its_process(Class& type, const char* instead) {
  type.def(
      "__reduce_ex__",
      [instead](const pybind11::object& self, int /*protocol*/) -> pybind11::object {
        throw pybind11::type_error("a " + pybind11::str(pybind11::type::of(self).attr("__name__")).cast<std::string>() +
                                   " belongs to the process that made it; " + instead);
      },
      pybind11::arg("protocol"));
}

// Any Python object with set, get and wait as a Store: torch.distributed's stores, a user's; our own are used as they
// are. Throws UsageError where a method is missing.
std::shared_ptr<Store> to_store(const pybind11::object& object);

}  // namespace holmes
