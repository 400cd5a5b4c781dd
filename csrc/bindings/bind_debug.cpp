// The flight record and the metrics of this process for Python.
#include <pybind11/stl.h>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_stacks.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/registry.hpp"
#include "holmes/record/watcher.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

constexpr double ns_per_s = 1e9;

py::dict to_dict(const Metrics& metrics) {
  py::list nics;
  for (const auto& [key, totals] : metrics.nics)
    nics.append(py::dict("group"_a = key.first, "nic"_a = key.second, "sent_bytes"_a = totals.sent_bytes,
                         "received_bytes"_a = totals.received_bytes,
                         "retransmitted_segments"_a = totals.retransmitted_segments,
                         "resent_chunks"_a = totals.resent_chunks, "connections"_a = totals.connections));
  py::list operations;
  for (const auto& [key, totals] : metrics.operations)
    operations.append(py::dict("group"_a = key.first, "op"_a = std::string(name(key.second)),
                               "completed"_a = totals.completed, "failed"_a = totals.failed, "bytes"_a = totals.bytes,
                               "seconds"_a = static_cast<double>(totals.ns) / ns_per_s));
  py::list failures;
  for (const auto& [key, count] : metrics.failures)
    failures.append(py::dict("group"_a = key.first, "error"_a = key.second, "count"_a = count));
  py::list communicators;
  for (const auto& [group, count] : metrics.communicators)
    communicators.append(py::dict("group"_a = group, "count"_a = count));
  return py::dict("nics"_a = nics, "operations"_a = operations, "failures"_a = failures,
                  "communicators"_a = communicators);
}

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
        Metrics metrics;
        {
          const GilRelease no_gil;
          metrics = collect_metrics();
        }
        return to_dict(metrics);
      },
      "Totals since the process began: lists of dicts, by group and NIC, operation or error; see holmes_comm.metrics. "
      "Local.");
  module.def("debug_socket_folder", &debug_socket_folder,
             "Folder in which processes of this user have the sockets that `holmes debug` asks. Local.");
}

}  // namespace
}  // namespace holmes

void bind_debug(py::module_& module) { holmes::bind(module); }
