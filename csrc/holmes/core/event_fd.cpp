#include "holmes/core/event_fd.hpp"

#include <sys/eventfd.h>

#include <cerrno>

#include "holmes/core/error.hpp"

namespace holmes {

UniqueFd event_fd() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd)
    throw SystemError("cannot make an event descriptor: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  return fd;
}

}  // namespace holmes
