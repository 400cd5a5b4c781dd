#include "holmes/core/unmap_watch.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>

#include "holmes/core/fork.hpp"
#include "holmes/core/types.hpp"

namespace holmes::unmap_watch {
namespace {

// Of Linux 5.11 and later; the header may be of an older one.
constexpr int user_mode_only = 1;
constexpr std::size_t most_ranges = 1024;
constexpr int look_again_ms = 1000;

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;  // 0: none
  bool is_whole = false;
};

struct Watch {
  std::mutex mutex;
  int fd = -1;
  bool is_impossible = false;
  std::array<Range, most_ranges> ranges;

  void after_fork_in_child() {
    if (fd >= 0) ::close(fd);  // the parent's: who reads it takes its news from it
    fd = -1;
    is_impossible = false;
    ranges.fill({});
  }
};

Watch& the_watch() { return fork_registry<Watch>(); }

void end(Watch& own, std::uintptr_t begin, std::uintptr_t end) {
  for (Range& range : own.ranges)
    if (range.begin < end && begin < range.end) range.is_whole = false;
}

// Whether the descriptor is still what it was; a program may close all of its descriptors, and open others. Nothing is
// allocated: who waits for the listener may hold the allocator's lock.
bool is_open(int fd) {
  std::array<char, 32> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", fd);
  std::array<char, 64> name{};
  const ssize_t length = ::readlink(path.data(), name.data(), name.size());
  return length > 0 && std::string_view(name.data(), static_cast<std::size_t>(length)).ends_with("[userfaultfd]");
}

// What is reported, with the lock held: whoever unmapped goes on once it is read. False where nothing will be any more:
// then nothing is known to be whole.
bool hear(Watch& own, int fd) {
  std::array<uffd_msg, 16> messages;
  const ssize_t bytes = is_open(fd) ? ::read(fd, messages.data(), sizeof messages) : 0;
  if (bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EINTR)) {
    own.fd = -1;
    own.is_impossible = true;
    end(own, 0, UINTPTR_MAX);
    return false;
  }
  for (std::size_t i = 0; bytes > 0 && i < static_cast<std::size_t>(bytes) / sizeof(uffd_msg); ++i) {
    const uffd_msg& message = messages[i];
    if (message.event == UFFD_EVENT_REMAP)
      end(own, message.arg.remap.from, message.arg.remap.from + message.arg.remap.len);
    else
      end(own, message.arg.remove.start, message.arg.remove.end);
  }
  return true;
}

void* listen(void* argument) {
  Watch& own = *static_cast<Watch*>(argument);
  int fd = -1;
  {
    const std::lock_guard lock(own.mutex);
    fd = own.fd;
  }
  while (true) {
    pollfd waited{fd, POLLIN, 0};
    // Woken, poll looks the descriptor up again; where another one has its number, it would sleep on, and keep the
    // closed one, and who waits for its reader, for ever.
    if (::poll(&waited, 1, look_again_ms) < 0) continue;  // a signal, or no memory for now
    const std::lock_guard lock(own.mutex);
    if (!hear(own, fd)) return nullptr;
  }
}

// With all signals left to the program's threads.
bool start_listener(Watch& own) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread{};
  const bool is_started = ::pthread_create(&thread, nullptr, &listen, &own) == 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!is_started) return false;
  ::pthread_setname_np(thread, "holmes-unmap");
  ::pthread_detach(thread);
  return true;
}

bool open(Watch& own) {
  if (own.fd >= 0) return true;
  if (own.is_impossible) return false;
  own.is_impossible = true;
  own.fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | user_mode_only));
  if (own.fd < 0) return false;
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE;
  if (::ioctl(own.fd, UFFDIO_API, &api) == 0 && start_listener(own)) {
    own.is_impossible = false;
    return true;
  }
  ::close(own.fd);
  own.fd = -1;
  return false;
}

// Whether all of it is private memory of no file. (Memory of a file may end without a word: the file is truncated.)
bool is_anonymous(std::uintptr_t begin, std::uintptr_t end) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (begin < end && std::getline(maps, line)) {
    unsigned long from = 0;
    unsigned long to = 0;
    char flags[5] = {};
    unsigned long inode = 1;
    if (std::sscanf(line.c_str(), "%lx-%lx %4s %*x %*x:%*x %lu", &from, &to, flags, &inode) != 4) return false;
    if (to <= begin) continue;
    if (from > begin || inode != 0 || flags[3] != 'p') return false;
    begin = to;
  }
  return begin >= end;
}

}  // namespace

std::optional<Ticket> watch(const void* begin, std::size_t bytes) noexcept {
  try {
    const std::uintptr_t page = page_bytes();
    const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(begin) / page * page;
    const std::uintptr_t to = (reinterpret_cast<std::uintptr_t>(begin) + bytes + page - 1) / page * page;
    if (from >= to || !is_anonymous(from, to)) return std::nullopt;
    Watch& own = the_watch();
    const std::lock_guard lock(own.mutex);
    if (!open(own)) return std::nullopt;
    for (Ticket ticket = 0; ticket < most_ranges; ++ticket) {
      if (own.ranges[ticket].end != 0) continue;
      own.ranges[ticket] = {from, to, true};
      // Of writes to protected pages: there are none, so no access ever waits. What is wanted are the events.
      uffdio_register wanted{};
      wanted.range = {from, to - from};
      wanted.mode = UFFDIO_REGISTER_MODE_WP;
      if (::ioctl(own.fd, UFFDIO_REGISTER, &wanted) == 0) return ticket;
      own.ranges[ticket] = {};
      return std::nullopt;
    }
  } catch (...) {  // no memory
  }
  return std::nullopt;
}

bool is_whole(Ticket ticket) noexcept {
  Watch& own = the_watch();
  const std::lock_guard lock(own.mutex);
  return own.ranges[ticket].is_whole;
}

void release(Ticket ticket) noexcept {
  Watch& own = the_watch();
  const std::lock_guard lock(own.mutex);
  own.ranges[ticket] = {};
}

}  // namespace holmes::unmap_watch
