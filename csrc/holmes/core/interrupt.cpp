#include "holmes/core/interrupt.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

std::atomic<SignalCheck> signal_check{nullptr};

// Asked of the system once: every wait asks. The thread that a forked child goes on in is its first.
bool is_first_thread() {
  struct Answer {
    std::uint64_t epoch;
    bool is_first;
  };
  thread_local std::optional<Answer> known;
  const std::uint64_t epoch = fork_epoch();
  if (!known || known->epoch != epoch) known = {epoch, ::syscall(SYS_gettid) == ::getpid()};
  return known->is_first;
}

}  // namespace

void set_signal_check(SignalCheck check) { signal_check.store(check); }

bool handles_signals() { return signal_check.load(std::memory_order_relaxed) != nullptr && is_first_thread(); }

void check_signals() {
  if (handles_signals()) signal_check.load()();
}

void SignalTimer::ring() {
  if (handles()) due_ = Clock::now();
}

}  // namespace holmes
