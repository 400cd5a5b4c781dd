// Host: which machine, and which of its network namespaces, this process is on.
#pragma once

#include <string>

namespace holmes {

// Boot and network namespace of this thread, "boot:device:inode": equal on ranks that share a kernel, interfaces and
// loopback. Empty where the system does not show it, or no descriptor is left.
std::string machine_identity();

// The same, and the host's name where that is empty.
std::string host_identity();

}  // namespace holmes
