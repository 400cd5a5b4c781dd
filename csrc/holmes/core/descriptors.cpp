#include "holmes/core/descriptors.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <string>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"

namespace holmes {

UniqueFd event_fd() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd)
    throw SystemError("cannot make an event descriptor: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  return fd;
}

namespace {

void hold_now() {
  for (int fd = 0; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    UniqueFd null(::open("/dev/null", O_RDWR));  // takes the lowest number that is free
    if (null.get() <= STDERR_FILENO) null.release();
  }
}

void raise_now() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t before = limit.rlim_cur;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, most_open_files);
  if (limit.rlim_cur <= before) return;
  const auto change =
      "the limit of open files from " + std::to_string(before) + " to " + std::to_string(limit.rlim_cur);
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) {
    log(LogLevel::info, std::nullopt, "raised " + change + " (ulimit -n)");
  } else {
    log(LogLevel::info, std::nullopt, "cannot raise " + change + ": " + errno_text(errno));
  }
}

}  // namespace

void hold_standard_descriptors() noexcept {
  static std::once_flag held;
  std::call_once(held, hold_now);
}

void raise_open_files_limit() noexcept {
  static std::once_flag raised;
  std::call_once(raised, raise_now);
}

}  // namespace holmes
