// Preloaded: counts how often each thread has gone to sleep for a time, or given its processor away.
#include <dlfcn.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

namespace {

thread_local long sleeps = 0;

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// Of this thread.
long counted_sleeps() { return sleeps; }

int nanosleep(const timespec* time, timespec* left) {
  ++sleeps;
  static auto* const real = next<int(const timespec*, timespec*)>("nanosleep");
  return real(time, left);
}
int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  ++sleeps;
  static auto* const real = next<int(clockid_t, int, const timespec*, timespec*)>("clock_nanosleep");
  return real(clock, flags, time, left);
}
int usleep(useconds_t time) {
  ++sleeps;
  static auto* const real = next<int(useconds_t)>("usleep");
  return real(time);
}
int sched_yield() noexcept {
  ++sleeps;
  static auto* const real = next<int()>("sched_yield");
  return real();
}
}
