// Errors for Python: raised there as its classes, signals, and what std::terminate says before the process aborts.
#include <execinfo.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/translate_error.hpp"
#include "holmes/core/interrupt.hpp"

namespace {

std::terminate_handler previous = nullptr;

void print_exception() {
  const std::exception_ptr error = std::current_exception();
  if (!error) {
    std::fputs("no exception", stderr);
    return;
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    std::fputs(known.what(), stderr);
  } catch (...) {  // a thread's forced end would not be let through either
    std::fputs("an exception of no known class", stderr);
  }
}

[[noreturn]] void report() {
  std::array<char, 16> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  std::fprintf(stderr, "holmes: std::terminate in thread '%s' (", name.data());
  print_exception();
  std::fputs("); its stack:\n", stderr);
  std::fflush(stderr);
  std::array<void*, 64> frames;
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), static_cast<int>(frames.size())), STDERR_FILENO);
  if (previous) previous();
  std::abort();
}

// From now on the thread, the exception and the C++ stack are written to stderr; then comes what was to come before.
void report_terminate() {
  if (!previous) previous = std::set_terminate(&report);
}

void run_signal_handlers() {
  const holmes::GilAcquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const auto raised = std::make_shared<pybind11::error_already_set>();
  throw holmes::Interrupted(pybind11::str(raised->type().attr("__name__")),
                            [raised] { PyErr_SetObject(raised->type().ptr(), raised->value().ptr()); });
}

}  // namespace

void bind_error(pybind11::module_& /*module*/) {
  report_terminate();
  pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const holmes::HolmesError& error) {
      holmes::set_python_error(error);
    } catch (const holmes::Interrupted& interrupted) {
      interrupted.raise();
    }
  });
  holmes::set_signal_check(&run_signal_handlers);
}
