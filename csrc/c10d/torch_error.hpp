// Holmes' errors on their way through torch: every exception that leaves this module turns into the class of
// holmes_comm.errors, whichever of torch's two translators (pybind11's or HANDLE_TH_ERRORS) meets it.
#pragma once

#include <exception>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes::torch_backend {

// `error` in the form torch translates; an exception that is not a HolmesError stays what it is.
std::exception_ptr as_torch_error(std::exception_ptr error);

// What a signal's handler raised, in the form torch translates.
[[noreturn]] void throw_to_torch(const Interrupted& interrupted);

// From here on only the calling thread returns from calls of a group. torch asks for the interpreter's lock when a call
// returns, and where the interpreter is at its end, that ends the process (see bindings/gil.hpp).
void hold_other_threads();

// At the end of a call: does not return where the thread is to be held.
struct HeldAtTheEnd {
  HeldAtTheEnd() = default;
  ~HeldAtTheEnd();
  HeldAtTheEnd(const HeldAtTheEnd&) = delete;
  HeldAtTheEnd& operator=(const HeldAtTheEnd&) = delete;
};

// Runs `body`, a call; a HolmesError leaves it in the form torch translates.
template <typename Body>
decltype(auto) translated(Body&& body) {
  const HeldAtTheEnd held;
  try {
    return std::forward<Body>(body)();
  } catch (const HolmesError&) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  } catch (const Interrupted& interrupted) {
    throw_to_torch(interrupted);
  }
}

// Registers the pybind11 translator, which adds what the error knows (rank, peer, host, nic, errno) to its message.
void register_translator();

}  // namespace holmes::torch_backend
