// Compression for Python.
#include "holmes/comm/compression.hpp"

#include <pybind11/stl.h>

#include "bindings/bindings.hpp"

namespace py = pybind11;
using namespace py::literals;
using holmes::Compression;

void bind_compression(py::module_& module) {
  py::class_<Compression, std::shared_ptr<Compression>>(
      module, "Compression",
      "How the hop between clusters of an all_reduce is compressed (docs/hierarchy.md). With error feedback it keeps "
      "what\n"
      "compression left out of this rank's share and adds it the next time: use one object for each tensor then. "
      "Thread-safe.")
      .def(py::init<const std::string&, bool>(), "codec"_a, py::kw_only(), "error_feedback"_a = false,
           "`codec`: 'bf16' (half the bytes) or 'int8' (about a quarter; one scale per 256 values). Local.")
      .def_property_readonly("codec", &Compression::codec_name, "'bf16' or 'int8'.")
      .def_property_readonly("error_feedback", &Compression::has_error_feedback, "Whether it keeps what is left out.")
      .def("reset", &Compression::reset,
           "Forgets what was left out. Local. Raises UsageError while an operation uses it.");
}
