#include "torch_error.hpp"

#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <thread>

#include "bindings/gil.hpp"
#include "bindings/translate_error.hpp"

namespace holmes::torch_backend {
namespace {

// What torch's HANDLE_TH_ERRORS understands: it asks for the Python class and gives it the message.
struct TorchError final : torch::PyTorchError {
  explicit TorchError(const HolmesError& error) : torch::PyTorchError(error.what()), holmes_error(error) {}
  // Called with the GIL held.
  PyObject* python_type() override {
    try {
      // The module keeps the class alive.
      return pybind11::module_::import("holmes_comm.errors").attr(name(holmes_error.kind())).ptr();
    } catch (pybind11::error_already_set&) {
      return PyExc_RuntimeError;
    }
  }
  HolmesError holmes_error;
};

}  // namespace

std::exception_ptr as_torch_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const HolmesError& holmes_error) {
    return std::make_exception_ptr(TorchError(holmes_error));
  } catch (...) {
    return error;
  }
}

void throw_to_torch(const Interrupted& interrupted) {
  const GilAcquire gil;
  interrupted.raise();
  throw pybind11::error_already_set();
}

namespace {
std::atomic<std::thread::id> returning_thread{};  // none: all return
}

void hold_other_threads() { returning_thread.store(std::this_thread::get_id()); }

HeldAtTheEnd::~HeldAtTheEnd() {
  const auto thread = returning_thread.load(std::memory_order_relaxed);
  if (thread != std::thread::id() && thread != std::this_thread::get_id()) stand_still();
}

void register_translator() {
  pybind11::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const TorchError& torch_error) {
      set_python_error(torch_error.holmes_error);
    } catch (const HolmesError& holmes_error) {
      set_python_error(holmes_error);
    }
  });
}

}  // namespace holmes::torch_backend
