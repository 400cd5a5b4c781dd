// A process whose system errs, by LD_PRELOAD: HOLMES_FAULTY_CALLS names a file with three 8-byte numbers, looked at on
// every call: of how many messages of a page or more one received bit is still to be flipped, whether no thread can be
// started, and whether the disk is full. As failing memory or a faulty NIC changes bits that TCP's checksum no longer
// covers, and as RLIMIT_NPROC refuses threads, which root is not subject to.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { least_bytes = 4096 };

struct State {
  _Atomic int64_t flips;
  _Atomic int64_t refuses_threads;
  _Atomic int64_t disk_is_full;
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

ssize_t recvmsg(int fd, struct msghdr* message, int flags) {
  static ssize_t (*next)(int, struct msghdr*, int);
  if (!next) next = (ssize_t (*)(int, struct msghdr*, int))dlsym(RTLD_NEXT, "recvmsg");
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
