// File descriptors: UniqueFd owns one, event_fd makes one of an event; the standard ones, and how many this process may
// have.
#pragma once

#include <unistd.h>

#include <utility>

namespace holmes {

class UniqueFd {
public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

private:
  int fd_ = -1;
};

// An event descriptor, non-blocking and closed on exec. Throws SystemError.
UniqueFd event_fd();

// Opens /dev/null where standard input, output or error is closed: else a socket of ours would be in its place, and
// what somebody prints would go into its stream. Once per process, before the first socket. Thread-safe.
void hold_standard_descriptors() noexcept;

// Raises the soft limit of open files (ulimit -n) towards the hard one, to `most_open_files` at most: 1024, the usual
// one, is less than the sockets of many ranks take. Once per process, so that whoever lowers it later is obeyed; where
// the system refuses, nothing changes. Thread-safe.
void raise_open_files_limit() noexcept;

// More would be a trap for programs that walk over all descriptors they could have.
inline constexpr unsigned long most_open_files = 65536;

}  // namespace holmes
