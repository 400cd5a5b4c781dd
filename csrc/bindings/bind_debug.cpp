// The flight record and the metrics of this process for Python.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_stacks.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/record_json.hpp"
#include "holmes/record/watcher.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

void bind(py::module_& module) {
  set_stack_source(&python_stacks);
  module.def(
      "process_record",
      [](const std::string& reason) {
        const GilRelease no_gil;
        return process_record_json(reason, record_patience, record_settle);
      },
      "reason"_a, "The flight record of this process as JSON text; holmes_comm.flight_record() parses it. Local.");
  module.def(
      "process_metrics",
      [] {
        const GilRelease no_gil;
        JsonWriter json;
        append_json(json, collect_metrics());
        return json.text();
      },
      "Totals since the process began as JSON text; holmes_comm.metrics() parses it. Local.");
  module.def("debug_socket_folder", &debug_socket_folder,
             "Folder in which processes of this user have the sockets that `holmes debug` asks. Local.");
}

}  // namespace
}  // namespace holmes

void bind_debug(py::module_& module) { holmes::bind(module); }
