// A wall clock that can be set for one process, by LD_PRELOAD: no namespace has one of its own. HOLMES_FALSE_CLOCK names
// a file with eight bytes: the offset in seconds, looked at on every call. Monotonic clocks stay true, and absolute wall
// clock deadlines go to the kernel in its own time.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t* offset;

__attribute__((constructor)) static void open_clock(void) {
  const char* path = getenv("HOLMES_FALSE_CLOCK");
  const int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void* mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED) offset = mapped;
  close(fd);
}

static int64_t seconds(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t clock, struct timespec* now) {
  const long result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
  return (int)result;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec exact;
  const int result = clock_gettime(CLOCK_REALTIME, &exact);
  if (result == 0) *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
  return result;
}

time_t time(time_t* into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t* restrict condition, pthread_mutex_t* restrict mutex,
                           const struct timespec* restrict until) {
  typedef int (*Wait)(pthread_cond_t*, pthread_mutex_t*, const struct timespec*);
  const Wait wait = (Wait)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec true_until = *until;
  true_until.tv_sec -= seconds();
  return (wait ? wait : (Wait)dlsym(RTLD_NEXT, "pthread_cond_timedwait"))(condition, mutex, &true_until);
}

int sem_timedwait(sem_t* restrict semaphore, const struct timespec* restrict until) {
  typedef int (*Wait)(sem_t*, const struct timespec*);
  struct timespec true_until = *until;
  true_until.tv_sec -= seconds();
  return ((Wait)dlsym(RTLD_NEXT, "sem_timedwait"))(semaphore, &true_until);
}
