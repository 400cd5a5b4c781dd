#include "holmes/core/thread.hpp"

#include <sys/resource.h>

namespace holmes {
namespace {

std::string limit(int resource) {
  rlimit found{};
  ::getrlimit(static_cast<__rlimit_resource_t>(resource), &found);
  return found.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(found.rlim_cur);
}

}  // namespace

SystemError no_thread(const std::string& purpose, int system_errno) {
  return SystemError("cannot start a thread that " + purpose + ": " + errno_text(system_errno) +
                         "; a limit is reached: processes and threads of this user (ulimit -u: " + limit(RLIMIT_NPROC) +
                         "), bytes of address space (ulimit -v: " + limit(RLIMIT_AS) +
                         ") or the container's threads (pids.max); raise it",
                     {.system_errno = system_errno});
}

}  // namespace holmes
