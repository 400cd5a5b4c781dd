#include "bindings/bindings.hpp"
#include "bindings/translate_error.hpp"

void bind_error(pybind11::module_& /*module*/) {
  pybind11::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const holmes::HolmesError& error) {
      holmes::set_python_error(error);
    }
  });
}
