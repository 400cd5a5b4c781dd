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
  const GilAcquire gil;
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

void define_debug(py::module_& module) {
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

void bind_debug(py::module_& module) { holmes::define_debug(module); }
