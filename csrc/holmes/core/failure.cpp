#include "holmes/core/failure.hpp"

namespace holmes {

Failure failure_of(const HolmesError& error) { return {error.kind(), error.what(), error.context()}; }

std::exception_ptr error_of(const Failure& failure) {
  try {
    throw_error(failure.kind, failure.message, failure.context);
  } catch (...) {
    return std::current_exception();
  }
}

void throw_dead(const std::string& name, const Failure& failure) {
  throw_error(failure.kind, "communicator '" + name + "' is dead, make a new one. It failed with: " + failure.message,
              failure.context);
}

}  // namespace holmes
