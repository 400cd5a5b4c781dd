// Interrupted: a signal's handler ended a wait. Handlers are the program's, in a language above (Python), which runs
// them in its main thread, between calls: so a thread that waits asks for them.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>

#include "holmes/core/clock.hpp"

namespace holmes {

// What a handler raised (KeyboardInterrupt). Not a HolmesError: it belongs to the program, and nobody recovers from it.
class Interrupted : public std::exception {
public:
  // `name`: of the exception's class. `raise` hands it to the language it came from.
  Interrupted(std::string name, std::function<void()> raise) : name_(std::move(name)), raise_(std::move(raise)) {}
  const char* what() const noexcept override { return name_.c_str(); }
  void raise() const { raise_(); }

private:
  std::string name_;
  std::function<void()> raise_;
};

// Runs the handlers of the signals that came; throws Interrupted where one raises.
using SignalCheck = void (*)();
// Once, before anything waits. Without it nothing asks for signals.
void set_signal_check(SignalCheck check);

// Longer than this no wait goes on without a look: a signal wakes a sleeping thread only where it meets it asleep.
constexpr std::chrono::milliseconds signal_check_interval{50};

// Whether handlers run in the calling thread: the process's first, or the one that a forked child goes on in.
bool handles_signals();
// Of no effect in another thread. The caller holds no locks: handlers do what they like.
void check_signals();

// When a thread that waits is to look. It asks no clock before the wait has gone on for a while. `now`: for who has
// looked at the clock already.
class SignalTimer {
public:
  // Absent: never.
  std::optional<Clock::time_point> due() { return due_ ? due_ : handles() ? due(Clock::now()) : std::nullopt; }
  std::optional<Clock::time_point> due(Clock::time_point now) {
    if (!due_ && handles()) due_ = now + signal_check_interval;
    return due_;
  }
  bool is_due() { return due() && Clock::now() >= *due_; }
  bool is_due(Clock::time_point now) { return due(now) && now >= *due_; }
  // A system call was interrupted.
  void ring();

private:
  bool handles() {
    if (!handles_) handles_ = handles_signals();
    return *handles_;
  }

  std::optional<bool> handles_;
  std::optional<Clock::time_point> due_;
};

}  // namespace holmes
