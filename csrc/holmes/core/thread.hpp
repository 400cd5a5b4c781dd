// Threads: an error that says which limit was reached where the system refuses one.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes {

SystemError no_thread(const std::string& purpose, int system_errno);

// `purpose`: completes "cannot start a thread that ...".
template <class Body>
std::thread start_thread(const std::string& purpose, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw no_thread(purpose, error.code().value());
  }
}

}  // namespace holmes
