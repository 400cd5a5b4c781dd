#include "holmes/core/interrupt.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace holmes {
namespace {

std::atomic<SignalCheck> signal_check{nullptr};

}  // namespace

void set_signal_check(SignalCheck check) { signal_check.store(check); }

bool handles_signals() {
  return signal_check.load(std::memory_order_relaxed) != nullptr && ::syscall(SYS_gettid) == ::getpid();
}

void check_signals() {
  if (handles_signals()) signal_check.load()();
}

std::optional<Clock::time_point> SignalTimer::due() {
  if (!handles_) {
    handles_ = handles_signals();
    if (*handles_) due_ = Clock::now() + signal_check_interval;
  }
  return due_;
}

void SignalTimer::ring() {
  if (due()) due_ = Clock::now();
}

}  // namespace holmes
