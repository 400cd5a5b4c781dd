// Watchdog: the thread that looks after all NCCL sessions of this process, since neither NCCL nor CUDA reports by
// itself.
#pragma once

#include <memory>

namespace holmes::nccl {

class Session;

// From now on the session is polled, as long as it lives: finished operations, deadlines, NCCL's asynchronous errors.
// Thread-safe.
void watch(const std::shared_ptr<Session>& session);
// Something was put on a device: look after it from now on.
void wake_watchdog();

}  // namespace holmes::nccl
