// What a communicator is made with, for Python: its options, the environment variables, Compression.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/python_values.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/env.hpp"
#include "holmes/reduce/compression.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

// All fields, by name.
py::dict fields_of(const CommunicatorOptions& options) {
  py::dict fields;
  visit_fields([&]<typename Field>(const char* name, Field CommunicatorOptions::* field) {
    fields[name] = PythonField<Field>::get(options.*field);
  });
  return fields;
}

CommunicatorOptions from_dict(const py::dict& fields) {
  CommunicatorOptions options;
  const py::object self = py::cast(&options, py::return_value_policy::reference);
  for (const auto& [name, value] : fields) {
    if (!py::hasattr(self, name))
      throw py::type_error("CommunicatorOptions has no field '" + py::str(name).cast<std::string>() + "'");
    try {
      py::setattr(self, name, value);
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      const auto field = py::str(name).cast<std::string>();
      const auto shown = field == "secret" ? py::str(py::type::handle_of(value)) : py::repr(value);
      throw py::type_error("CommunicatorOptions: " + field + "=" + shown.cast<std::string>() +
                           " is of another type than it can be");
    }
  }
  check_values(options);
  return options;
}

}  // namespace
}  // namespace holmes

namespace {

void bind_env(py::module_& module) {
  using holmes::EnvVariable;
  py::class_<EnvVariable>(module, "EnvVariable", "An environment variable that Holmes reads; texts are Markdown.")
      .def_readonly("name", &EnvVariable::name)
      .def_readonly("values", &EnvVariable::values)
      .def_readonly("default", &EnvVariable::default_value)
      .def_readonly("meaning", &EnvVariable::meaning)
      .def("__repr__", [](const EnvVariable& variable) { return "<EnvVariable " + std::string(variable.name) + ">"; });
  module.def("env_variables", &holmes::env_variables, "All environment variables that Holmes reads. Local.");
  module.def(
      "check_environment",
      [] {
        const holmes::Env env = holmes::Env::read();
        static_cast<void>(holmes::given_secret("", env));
      },
      "Raises UsageError where a variable has a value with which no communicator can be made. Local.");
  module.def("variable_meant_by", &holmes::variable_meant_by, "name"_a,
             "The variable of Holmes whose name is nearly `name`; None: there is none, or `name` is one. Local.");
}

void bind_compression(py::module_& module) {
  using holmes::Compression;
  py::class_<Compression, std::shared_ptr<Compression>>(
      module, "Compression",
      "How the hop between clusters of an all_reduce is compressed (docs/hierarchy.md). With error feedback it keeps "
      "what\n"
      "compression left out of this rank's share and adds it the next time: use one object for each tensor then. "
      "Thread-safe.\nA copy, pickled or not, has kept nothing yet.")
      .def(py::init<const std::string&, bool>(), "codec"_a, py::kw_only(), "error_feedback"_a = false,
           "`codec`: 'bf16' (half the bytes) or 'int8' (about a quarter; one scale per 256 values). Local.")
      .def_property_readonly("codec", &Compression::codec_name, "'bf16' or 'int8'.")
      .def_property_readonly("error_feedback", &Compression::has_error_feedback, "Whether it keeps what is left out.")
      .def("reset", &Compression::reset,
           "Forgets what was left out. Local. Raises UsageError while an operation uses it.")
      .def("__repr__",
           [](const Compression& self) {
             const std::string feedback = self.has_error_feedback() ? ", error_feedback=True" : "";
             return "Compression('" + std::string(self.codec_name()) + "'" + feedback + ")";
           })
      .def(py::pickle(
          [](const Compression& self) {
            return py::make_tuple(std::string(self.codec_name()), self.has_error_feedback());
          },
          [](const py::tuple& state) {
            return std::make_shared<Compression>(state[0].cast<std::string>(), state[1].cast<bool>());
          }));
}

}  // namespace

void bind_options(py::module_& module) {
  bind_env(module);
  bind_compression(module);
  using holmes::CommunicatorOptions;
  py::class_<CommunicatorOptions> options(
      module, "CommunicatorOptions",
      "What a communicator is made of; the fields are those of the C++ struct (holmes/core/options.hpp says what each "
      "means),\ndurations in seconds. What the other arguments of a function that takes one say counts over it.");
  options.def(py::init([](const py::KWArgs<py::object>& fields) { return holmes::from_dict(fields); }),
              "Fields by name; the others have the defaults of holmes_comm.init. Raises TypeError for a name that does "
              "not exist\nor a value of another type, UsageError for a value that is not possible.");
  holmes::visit_fields([&]<typename Field>(const char* name, Field CommunicatorOptions::* field) {
    using Python = holmes::PythonField<Field>;
    options.def_property(
        name, [field](const CommunicatorOptions& self) { return Python::get(self.*field); },
        [name, field](CommunicatorOptions& self, const typename Python::Type& value) {
          self.*field = Python::set(name, value);
        });
  });
  options
      .def(
          "__eq__",
          [](const CommunicatorOptions& self, const py::object& other) {
            return py::isinstance<CommunicatorOptions>(other) && self == other.cast<const CommunicatorOptions&>();
          },
          "other"_a)
      .def("check", &holmes::check_values, "Raises UsageError naming a number that is not possible. Local.")
      .def("__copy__", [](const CommunicatorOptions& self) { return self; })
      .def("__repr__",
           [](const CommunicatorOptions& self) {
             py::dict shown = holmes::fields_of(self);
             shown["secret"] = self.secret.empty() ? "" : "...";
             return "CommunicatorOptions(**" + py::repr(shown).cast<std::string>() + ")";
           })
      .def(py::pickle([](const CommunicatorOptions& self) { return holmes::fields_of(self); }, &holmes::from_dict));
}
