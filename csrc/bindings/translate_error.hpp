// Raises a HolmesError as the class of the same name in holmes_comm.errors, with all its attributes. Shared by both
// modules (_C and _c10d).
#pragma once

#include <pybind11/pybind11.h>

#include "holmes/core/error.hpp"

namespace holmes {

// Sets the Python error. Needs the GIL.
inline void set_python_error(const HolmesError& error) {
  namespace py = pybind11;
  const ErrorContext& context = error.context();
  const auto optional = [](const std::optional<int>& value) -> py::object {
    return value ? py::object(py::int_(*value)) : py::object(py::none());
  };
  const py::object type = py::module_::import("holmes_comm.errors").attr(name(error.kind()));
  const py::object value = type(error.what(), py::arg("rank") = optional(context.rank),
                                py::arg("peer") = optional(context.peer), py::arg("host") = context.host,
                                py::arg("nic") = context.nic, py::arg("system_errno") = optional(context.system_errno));
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace holmes
