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
  const auto codec_name = [](const Compression& self) { return std::string(holmes::name(self.codec())); };
  const auto has_rotation = [](const Compression& self) { return holmes::is_rotated(self.codec()); };
  const auto make = [](const std::string& codec, bool rotation, bool error_feedback, bool differences) {
    return std::make_shared<Compression>(Compression::Settings{.codec = holmes::codec_from_name(codec, rotation),
                                                               .error_feedback = error_feedback,
                                                               .differences = differences});
  };
  py::class_<Compression, std::shared_ptr<Compression>>(
      module, "Compression",
      "How the hop between clusters of an all_reduce, reduce_scatter or all_gather of float32 is compressed "
      "(docs/hierarchy.md).\nOne that keeps something of its tensor (error_feedback, differences) is for one tensor. "
      "Thread-safe.\nA copy, pickled or not, has kept nothing yet.")
      .def(py::init(make), "codec"_a, py::kw_only(), "rotation"_a = false, "error_feedback"_a = false,
           "differences"_a = false,
           "`codec`: 'bf16' (half the bytes), 'int8' (about a quarter) or 'int4' (about an eighth; both with one scale "
           "per 256\nvalues). `rotation`: integers of each 256 values after a Hadamard rotation, which spreads the "
           "error of large ones.\n`error_feedback`: what was left out of this rank's share is kept and added the next "
           "time. `differences`: an\nall_gather sends only what has changed since the one before, the first one "
           "everything as it is. Local.\nRaises UsageError for another codec, or a rotation of bf16.")
      .def_property_readonly("codec", codec_name, "'bf16', 'int8' or 'int4'.")
      .def_property_readonly("rotation", has_rotation, "Whether blocks are rotated.")
      .def_property_readonly(
          "error_feedback", [](const Compression& self) { return self.settings().error_feedback; },
          "Whether it keeps what is left out.")
      .def_property_readonly(
          "differences", [](const Compression& self) { return self.settings().differences; },
          "Whether an all_gather sends what has changed.")
      .def("reset", &Compression::reset,
           "Forgets what it keeps; on all ranks alike. Local. Raises UsageError while an operation uses it.")
      .def("__repr__",
           [=](const Compression& self) {
             std::string text = "Compression('" + codec_name(self) + "'";
             if (has_rotation(self)) text += ", rotation=True";
             if (self.settings().error_feedback) text += ", error_feedback=True";
             if (self.settings().differences) text += ", differences=True";
             return text + ")";
           })
      .def(py::pickle(
          [=](const Compression& self) {
            return py::make_tuple(codec_name(self), has_rotation(self), self.settings().error_feedback,
                                  self.settings().differences);
          },
          [=](const py::tuple& state) {
            return make(state[0].cast<std::string>(), state[1].cast<bool>(), state[2].cast<bool>(),
                        state[3].cast<bool>());
          }));
  module.def(
      "exchange_thread_compression",
      [](const std::optional<std::shared_ptr<Compression>>& compression) {
        return holmes::exchange_thread_compression(compression.value_or(nullptr));
      },
      "compression"_a = py::none(),
      "What operations that this thread starts are compressed with where they can be, from now on; returns what "
      "it was. See\nholmes_comm.compressed. Local.");
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
