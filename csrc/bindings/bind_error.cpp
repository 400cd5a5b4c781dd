#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/translate_error.hpp"
#include "holmes/core/interrupt.hpp"

namespace {

void run_signal_handlers() {
  const holmes::GilAcquire gil;
  if (PyErr_CheckSignals() == 0) return;
  const auto raised = std::make_shared<pybind11::error_already_set>();
  throw holmes::Interrupted(pybind11::str(raised->type().attr("__name__")),
                            [raised] { PyErr_SetObject(raised->type().ptr(), raised->value().ptr()); });
}

}  // namespace

void bind_error(pybind11::module_& /*module*/) {
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
