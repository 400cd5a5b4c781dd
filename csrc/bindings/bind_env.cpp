#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "holmes/core/env.hpp"

namespace py = pybind11;

void bind_env(py::module_& module) {
  using holmes::EnvVariable;
  py::class_<EnvVariable>(module, "EnvVariable", "An environment variable that Holmes reads; texts are Markdown.")
      .def_readonly("name", &EnvVariable::name)
      .def_readonly("values", &EnvVariable::values)
      .def_readonly("default", &EnvVariable::default_value)
      .def_readonly("meaning", &EnvVariable::meaning);
  module.def("env_variables", &holmes::env_variables, "All environment variables that Holmes reads. Local.");
}
