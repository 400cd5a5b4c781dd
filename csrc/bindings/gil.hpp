// Gil: lets go of the interpreter's lock and takes it, in threads that may outlive the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <optional>

#include "holmes/core/options.hpp"

namespace holmes {

// For a thread that the interpreter ended without: Python before 3.14 would end it where it asks for the lock, by an
// unwinding that no destructor lets through (std::terminate). Like Python 3.14, it stands still until the process ends.
[[noreturn]] inline void stand_still() {
  for (;;) ::pause();
}

// Without the lock, which the thread has, until the end of the scope.
class GilRelease {
public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding
      stand_still();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

private:
  PyThreadState* state_;
};

// With the lock, which the thread has, until a call of the library lets go of it (CallOptions::held), and with it again
// from the end of the scope on. To let go of it and take it costs 60 ns, a fifth of a barrier within a host.
class GilHold final : public CallerLock {
public:
  void let_go() override {
    if (!released_) released_.emplace();
  }

private:
  std::optional<GilRelease> released_;
};

// With the lock until the end of the scope, whether the thread has it or not.
class GilAcquire {
public:
  GilAcquire() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      stand_still();
    }
  }
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

private:
  PyGILState_STATE state_;
};

}  // namespace holmes
