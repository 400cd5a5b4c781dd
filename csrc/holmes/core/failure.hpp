// Failure: an error as a value that is kept, sent to the peers and raised.
#pragma once

#include <exception>
#include <string>

#include "holmes/core/error.hpp"

namespace holmes {

struct Failure {
  ErrorKind kind = ErrorKind::communicator;
  std::string message;
  ErrorContext context{};

  [[noreturn]] void raise() const { throw_error(kind, message, context); }
};

// What a peer did that left in order, as errors say it.
inline constexpr const char* farewell = "destroyed its communicator";

Failure failure_of(const HolmesError& error);
// What a failed Work raises.
std::exception_ptr error_of(const Failure& failure);
// What every later call on communicator `name` raises.
[[noreturn]] void throw_dead(const std::string& name, const Failure& failure);

}  // namespace holmes
