// The I/O threads of this process: how many there are, on which processors, and which communicator gets which.
#pragma once

#include <string>

#include "holmes/core/env.hpp"
#include "holmes/engine/io_thread.hpp"

namespace holmes {

// The thread for one more communicator, whose first NIC is `interface` (empty: none). Communicators take turns over the
// HOLMES_IO_THREADS threads that run on the same processors (HOLMES_IO_CPUS); threads are started when first needed and
// never end. Thread-safe. Throws UsageError where this process may not use a processor that HOLMES_IO_CPUS names.
IoThread& io_thread_for(const Env& env, const std::string& interface);

}  // namespace holmes
