// A process whose system errs, by LD_PRELOAD: HOLMES_FAULTY_CALLS names a file with four 8-byte numbers, looked at on
// every call: of how many messages of a page or more one received bit is still to be flipped, whether no thread can be
// started, whether the disk is full, and on which of the next calls the process is killed (0: on none). As failing
// memory or a faulty NIC changes bits that TCP's checksum no longer covers, as RLIMIT_NPROC refuses threads, which root
// is not subject to, and as a machine loses power between any two system calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { least_bytes = 4096 };

struct State {
  _Atomic int64_t flips;
  _Atomic int64_t refuses_threads;
  _Atomic int64_t disk_is_full;
  _Atomic int64_t killed_on;
};

static struct State* state;

__attribute__((constructor)) static void open_state(void) {
  const char* path = getenv("HOLMES_FAULTY_CALLS");
  const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED) state = mapped;
  close(fd);
}

static int is_internet(int fd) {
  int domain = 0;
  socklen_t size = sizeof domain;
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && (domain == AF_INET || domain == AF_INET6);
}

static int takes_one(void) {
  int64_t left = atomic_load(&state->flips);
  while (left > 0)
    if (atomic_compare_exchange_weak(&state->flips, &left, left - 1)) return 1;
  return 0;
}

static void flip_in_the_middle(const struct msghdr* message, size_t bytes) {
  size_t at = bytes / 2;
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    const struct iovec piece = message->msg_iov[i];
    if (at < piece.iov_len) {
      ((unsigned char*)piece.iov_base)[at] ^= 0x10;
      return;
    }
    at -= piece.iov_len;
  }
}

static void count_call(void) {
  if (!state || atomic_load(&state->killed_on) <= 0) return;
  if (atomic_fetch_sub(&state->killed_on, 1) == 1) kill(getpid(), SIGKILL);
}

// What a communicator asks the system for, but for what is below.
#define COUNTED(type, name, parameters, ...)                                  \
  type name parameters {                                                      \
    static type(*next) parameters;                                            \
    if (!next) next = (type(*) parameters)dlsym(RTLD_NEXT, #name);            \
    count_call();                                                             \
    return next(__VA_ARGS__);                                                 \
  }

COUNTED(int, socket, (int domain, int type, int protocol), domain, type, protocol)
COUNTED(int, bind, (int fd, const struct sockaddr* address, socklen_t size), fd, address, size)
COUNTED(int, listen, (int fd, int backlog), fd, backlog)
COUNTED(int, connect, (int fd, const struct sockaddr* address, socklen_t size), fd, address, size)
COUNTED(int, accept4, (int fd, struct sockaddr* address, socklen_t* size, int flags), fd, address, size, flags)
COUNTED(int, setsockopt, (int fd, int level, int name, const void* value, socklen_t size), fd, level, name, value, size)
COUNTED(int, shutdown, (int fd, int how), fd, how)
COUNTED(ssize_t, send, (int fd, const void* data, size_t bytes, int flags), fd, data, bytes, flags)
COUNTED(ssize_t, sendmsg, (int fd, const struct msghdr* message, int flags), fd, message, flags)
COUNTED(ssize_t, recv, (int fd, void* data, size_t bytes, int flags), fd, data, bytes, flags)
COUNTED(ssize_t, process_vm_readv,
        (pid_t pid, const struct iovec* here, unsigned long here_count, const struct iovec* there,
         unsigned long there_count, unsigned long flags),
        pid, here, here_count, there, there_count, flags)
COUNTED(int, memfd_create, (const char* name, unsigned flags), name, flags)
COUNTED(int, ftruncate, (int fd, off_t bytes), fd, bytes)
COUNTED(int, eventfd, (unsigned value, int flags), value, flags)
COUNTED(int, epoll_ctl, (int fd, int operation, int other, struct epoll_event* event), fd, operation, other, event)
COUNTED(int, poll, (struct pollfd * fds, nfds_t count, int timeout), fds, count, timeout)

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  static ssize_t (*next)(int, struct msghdr*, int);
  if (!next) next = (ssize_t (*)(int, struct msghdr*, int))dlsym(RTLD_NEXT, "recvmsg");
  count_call();
  const ssize_t bytes = next(fd, message, flags);
  const int error = errno;
  if (bytes >= least_bytes && !(flags & MSG_PEEK) && state && is_internet(fd) && takes_one())
    flip_in_the_middle(message, (size_t)bytes);
  errno = error;
  return bytes;
}

ssize_t write(int fd, const void* data, size_t bytes) {
  static ssize_t (*next)(int, const void*, size_t);
  if (!next) next = (ssize_t (*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  struct stat status;
  if (state && atomic_load(&state->disk_is_full) && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
    errno = ENOSPC;
    return -1;
  }
  return next(fd, data, bytes);
}

int pthread_create(pthread_t* restrict thread, const pthread_attr_t* restrict attributes, void* (*body)(void*),
                   void* restrict argument) {
  typedef int (*Create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  if (state && atomic_load(&state->refuses_threads)) return EAGAIN;
  return ((Create)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, body, argument);
}
