// Work for Python.
#include <pybind11/stl.h>

#include <array>
#include <cstdio>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_values.hpp"
#include "holmes/comm/communicator.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

// To the millisecond.
std::string repr(const Work& work) {
  std::array<char, 32> elapsed{};
  std::snprintf(elapsed.data(), elapsed.size(), "%.3f", std::chrono::duration<double>(work.elapsed()).count());
  return "<Work " + std::string(name(work.state())) + ", " + elapsed.data() + " s>";
}

void define_work(py::module_& module) {
  py::class_<Work, WorkPtr> type(module, "Work",
                                 "An asynchronous operation. It holds the operation's buffers until it is final, and "
                                 "its communicator as long as it "
                                 "lives. Thread-safe.");
  stays_in_its_process(type, "wait for it there");
  type.def(
          "wait",
          [](Work& work, const TimeoutSeconds& timeout_s) {
            const GilRelease no_gil;
            if (timeout_s) {
              work.wait(to_duration("timeout_s", *timeout_s));
            } else {
              work.wait();
            }
          },
          "timeout_s"_a = py::none(),
          "Blocks until the operation is final. Raises its error where it failed, always; raises TimeoutError after\n"
          "`timeout_s` seconds (None: no limit but the operation's own deadline) and leaves the operation running. "
          "Local.")
      .def(
          "wait_stream",
          [](Work& work, const std::optional<std::uintptr_t>& stream) {
            const GilRelease no_gil;
            if (stream)
              work.wait_stream(reinterpret_cast<void*>(*stream));
            else
              work.join();
          },
          "stream"_a = py::none(),
          "Device memory: what is put on `stream` (a cudaStream_t as a number; None: the stream the operation was "
          "called "
          "on) from\nnow on runs after the operation; does not block. Host memory: as wait. Raises where the operation "
          "has failed. Local.")
      .def_property_readonly(
          "state", [](const Work& work) { return name(work.state()); }, "'queued', 'running', 'completed' or 'failed'.")
      .def("is_completed", &Work::is_final,
           "Whether the operation is final, successfully or not. Local, does not block.")
      .def_property_readonly("source_rank", &Work::source_rank,
                             "Rank a received message came from; -1 for other operations and before the end.")
      .def_property_readonly(
          "elapsed_s", [](const Work& work) { return std::chrono::duration<double>(work.elapsed()).count(); },
          "Seconds from submission to the final state (to now where it is not final).")
      .def("__repr__", &repr);
}

}  // namespace
}  // namespace holmes

void bind_work(py::module_& module) { holmes::define_work(module); }
