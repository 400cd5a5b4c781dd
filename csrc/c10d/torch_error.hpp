// Holmes' errors on their way through torch: every exception that leaves this module turns into the class of
// holmes_comm.errors, whichever of torch's two translators (pybind11's or HANDLE_TH_ERRORS) meets it.
#pragma once

#include <exception>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes::torch_backend {

// `error` in the form torch translates; an exception that is not a HolmesError stays what it is.
std::exception_ptr as_torch_error(std::exception_ptr error);

// Runs `body`; a HolmesError leaves it in the form torch translates.
template <typename Body>
decltype(auto) translated(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const HolmesError&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
}

// Registers the pybind11 translator, which adds what the error knows (rank, peer, host, nic, errno) to its message.
void register_translator();

}  // namespace holmes::torch_backend
