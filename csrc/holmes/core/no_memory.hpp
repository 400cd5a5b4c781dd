// What to do where memory is short for a moment, or for longer.
#pragma once

#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "holmes/core/clock.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"

namespace holmes {

// For what may be left out.
template <typename Action>
void where_memory_allows(const Action& action) {
  try {
    action();
  } catch (const std::bad_alloc&) {
    return;
  }
}

// For what has to be, as others wait for it: what `make` returns, which is tried for up to a second, else what `spare`
// returns, which takes no memory.
template <typename Make, typename Spare>
auto made_or(const Make& make, const Spare& spare) {
  constexpr std::chrono::seconds patience{1};
  constexpr std::chrono::milliseconds pause{1};
  const auto until = Clock::now() + patience;
  while (true) {
    try {
      return make();
    } catch (const std::bad_alloc&) {
      if (Clock::now() >= until) return spare();
    }
    std::this_thread::sleep_for(pause);
  }
}

// The failure that `make` returns; where memory stays short, one of this kind that says so.
template <typename Make>
Failure failure_or(ErrorKind kind, const Make& make) {
  return made_or(make, [kind] { return Failure{kind, "out of memory", {}}; });  // so few letters take none
}

// Of what was thrown, whatever it is.
inline Failure failure_of(const std::exception_ptr& error) {
  return failure_or(ErrorKind::system, [&]() -> Failure {
    try {
      std::rethrow_exception(error);
    } catch (const HolmesError& known) {
      return failure_of(known);
    } catch (const Interrupted& interrupted) {
      return {ErrorKind::aborted, std::string("it was interrupted by ") + interrupted.what(), {}};
    } catch (const std::exception& other) {
      return {ErrorKind::system, other.what(), {}};
    }
  });
}

}  // namespace holmes
