// The flight record and the metrics of this process for Python.
#include <pybind11/stl.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/registry.hpp"
#include "holmes/record/watcher.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

struct Answer {
  std::mutex mutex;
  std::condition_variable changed;
  std::string json;
  bool is_there = false;
};

std::atomic<bool> is_asking{false};

std::string ask_python() {
  const py::gil_scoped_acquire gil;
  try {
    return py::module_::import("holmes_comm.recorder").attr("stacks_json")().cast<std::string>();
  } catch (py::error_already_set&) {
    return "[]";  // diagnosis goes on without it
  }
}

// Where the Python threads are: what holmes_comm.recorder.stacks_json says; an empty array where the interpreter lets
// nobody in for `patience`: some thread is in native code that keeps its lock. Called without that lock.
std::string python_stacks(Duration patience) {
  // A thread that waits for the interpreter cannot be called back: one at a time.
  if (!Py_IsInitialized() || is_asking.exchange(true)) return "[]";
  const auto answer = std::make_shared<Answer>();
  std::thread([answer] {
    std::string json = ask_python();
    is_asking = false;
    std::lock_guard lock(answer->mutex);
    answer->json = std::move(json);
    answer->is_there = true;
    answer->changed.notify_all();
  }).detach();
  std::unique_lock lock(answer->mutex);
  answer->changed.wait_for(lock, patience, [&] { return answer->is_there; });
  return answer->is_there ? answer->json : "[]";
}

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
