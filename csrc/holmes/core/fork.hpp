// Fork: what a forked child (a DataLoader's worker, say) inherits of this process's communicators, and lets go of.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "holmes/core/error.hpp"

namespace holmes {

// Differs between a process and the children it forks.
std::uint64_t fork_epoch();

// The one Own of this process, made when first asked for. A forked child has none of its parent's threads, and perhaps
// a locked mutex: it gets one of its own. Never destroyed: who uses it may outlive static destruction. Own has an
// `epoch` = fork_epoch(), and starts nothing when it is made: of two threads' one is dropped. Thread-safe.
template <typename Own>
Own& own_of_process() {
  static std::atomic<Own*> current{nullptr};
  Own* found = current.load();
  if (found && found->epoch == fork_epoch()) return *found;
  auto fresh = std::make_unique<Own>();
  return current.compare_exchange_strong(found, fresh.get()) ? *fresh.release() : *found;
}

// The one Registry of this process, never destroyed: its fork handlers stay. A fork waits for its `mutex`, so that it
// is whole in the child, where `after_fork_in_child()` runs, with the mutex held, before fork returns. Throws
// SystemError.
template <typename Registry>
Registry& fork_registry() {
  static Registry* const made = new Registry();
  static const int registered = ::pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
                                                 [] {
                                                   made->after_fork_in_child();
                                                   made->mutex.unlock();
                                                 });
  if (registered != 0)
    throw SystemError("cannot register a fork handler: " + errno_text(registered), {.system_errno = registered});
  return *made;
}

// Sockets that only the process that opened them may keep open: while a child held them too, the peers of a killed
// process would not learn of its end. In a forked child each number leads to nothing from the start; it stays taken, so
// that closing it is harmless there. Thread-safe.
class UninheritedSockets {
public:
  // Throws SystemError where there is no descriptor left.
  explicit UninheritedSockets(std::vector<int> fds);
  UninheritedSockets(const UninheritedSockets&) = delete;
  UninheritedSockets& operator=(const UninheritedSockets&) = delete;
  // Before the sockets are closed.
  ~UninheritedSockets();

  // In the child, between fork and return. Async-signal-safe.
  void let_go(int nothing_fd) const noexcept;

private:
  std::vector<int> fds_;
};

}  // namespace holmes
