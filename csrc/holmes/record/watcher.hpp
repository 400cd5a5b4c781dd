// The watcher: one thread of the process that answers for it while all others may hang. It gives the flight record to
// whoever connects to the process's private socket, and writes it to the dump folder on a signal or request.
#pragma once

#include <string>

#include "holmes/core/env.hpp"

namespace holmes {

// Starts it where there is none in this process, as `env` says. Where the system refuses the socket, the rest works.
// Thread-safe.
void start_watcher(const Env& env);

// Where processes of this user put their sockets: <pid>-<host>-<random>.sock. $XDG_RUNTIME_DIR/holmes where that is
// ours, else /tmp/holmes-<uid>.
std::string debug_socket_folder();

}  // namespace holmes
