// Lets a user-mode Linux run on processors whose registers take more room than it knows of (AMX: 11,008 bytes, where
// Linux 6.1 keeps 2,696). By LD_PRELOAD. The system takes registers only whole, so the kernel's first write fails
// (EFAULT) and it ends; here the rest is added to what it writes. Nothing is lost: which registers are in use is in what
// it writes, and those it does not know can be in use only in programs that ask for them by a call that it refuses.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

typedef long (*ptrace_call)(enum __ptrace_request, pid_t, void*, void*);

static char registers[1 << 16];  // 0 beyond what the kernel knows of
static size_t size;

long ptrace(enum __ptrace_request request, ...) {
  va_list words;
  va_start(words, request);
  const pid_t process = va_arg(words, pid_t);
  void* const address = va_arg(words, void*);
  void* const data = va_arg(words, void*);
  va_end(words);
  static ptrace_call next;
  if (!next) next = (ptrace_call)dlsym(RTLD_NEXT, "ptrace");
  if (request != PTRACE_SETREGSET || address != (void*)NT_X86_XSTATE) return next(request, process, address, data);
  if (!size) {
    struct iovec all = {registers, sizeof registers};
    if (next(PTRACE_GETREGSET, process, address, &all) < 0) return -1;
    memset(registers, 0, sizeof registers);
    size = all.iov_len;
  }
  const struct iovec* given = data;
  if (given->iov_len >= size) return next(request, process, address, data);
  memcpy(registers, given->iov_base, given->iov_len);
  struct iovec all = {registers, size};
  return next(request, process, address, &all);
}
