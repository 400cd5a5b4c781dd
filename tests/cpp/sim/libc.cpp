// What the library calls of the system: an executable's definitions go before the C library's. In a fiber they are the
// simulation's, outside of one, and for descriptors that the simulation has not opened, the system's.
#include <dlfcn.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "sim/network.hpp"
#include "sim/scheduler.hpp"

using namespace holmes::sim;

namespace {

// The C library's own.
#define SYSTEMS(name)                                                                          \
  (*[] {                                                                                       \
    static auto* const found = reinterpret_cast<decltype(&::name)>(::dlsym(RTLD_NEXT, #name)); \
    return found;                                                                              \
  }())

constexpr unsigned calls_between_turns = 64;  // on average: then another thread runs first
constexpr rlim_t open_files = 1 << 20;
constexpr std::time_t first_day_s = 1'700'000'000;
constexpr int once_runs = 1, once_is_done = 2;

// What every call begins with. A process that is to die at this one does.
Fiber& enter(const char* name) {
  Fiber& own = *current_fiber();
  own.last_call = name;
  Process& process = *own.process;
  if (++process.calls == process.dies_at_call) {
    network().end_process(process.number, process.dies_silently);
    scheduler().end_process();
  }
  if (scheduler().below(calls_between_turns) == 0) scheduler().yield();
  return own;
}

template <typename Result>
Result answer(Result result) {
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  return -1;
}

Time time_of(const timespec& when) { return static_cast<Time>(when.tv_sec) * second + when.tv_nsec; }

timespec timespec_of(Time time) { return {static_cast<time_t>(time / second), static_cast<long>(time % second)}; }

Time after_ms(int timeout_ms) { return timeout_ms < 0 ? never : scheduler().now() + timeout_ms * millisecond; }

void hold(pthread_mutex_t* mutex) {
  mutex->__data.__lock = 1;
  mutex->__data.__owner = static_cast<int>(current_fiber()->number);
}

int take_lock(pthread_mutex_t* mutex, Time until) {
  auto& lock = mutex->__data;
  const int own = static_cast<int>(enter("pthread_mutex_lock").number);
  if (lock.__lock != 0 && lock.__owner == own) {
    if (lock.__kind != PTHREAD_MUTEX_RECURSIVE_NP) {
      std::fprintf(stderr, "simulation: a thread of process %d locks a mutex twice\n",
                   current_fiber()->process->number);
      std::abort();
    }
    ++lock.__count;
    return 0;
  }
  while (lock.__lock != 0) {
    ++lock.__nusers;  // of those that wait
    const bool is_woken = scheduler().wait_at(mutex, until);
    --lock.__nusers;
    if (!is_woken) return ETIMEDOUT;
  }
  hold(mutex);
  return 0;
}

int wait_on(pthread_cond_t* condition, pthread_mutex_t* mutex, Time until) {
  ::pthread_mutex_unlock(mutex);
  const bool is_woken = scheduler().wait_at(condition, until);
  take_lock(mutex, never);
  current_fiber()->last_call = "pthread_cond_wait";
  return is_woken ? 0 : ETIMEDOUT;
}

Fiber* fiber_of(pthread_t thread) { return reinterpret_cast<Fiber*>(thread); }

sockaddr_in ipv4(const sockaddr* address) {
  sockaddr_in result{};
  std::memcpy(&result, address, sizeof result);
  return result;
}

int tell_name(int fd, bool of_peer, sockaddr* address, socklen_t* length) {
  sockaddr_in found{};
  const int result = network().name(fd, of_peer, found);
  if (result < 0) return answer(result);
  std::memcpy(address, &found, std::min<std::size_t>(*length, sizeof found));
  *length = sizeof found;
  return 0;
}

}  // namespace

extern "C" {

// --- time ---

int clock_gettime(clockid_t clock, timespec* now) {
  if (!current_fiber()) return SYSTEMS(clock_gettime)(clock, now);
  *now = timespec_of(scheduler().now());
  if (clock == CLOCK_REALTIME) now->tv_sec += first_day_s;
  return 0;
}

int nanosleep(const timespec* duration, timespec* left) {
  if (!current_fiber()) return SYSTEMS(nanosleep)(duration, left);
  enter("nanosleep");
  scheduler().block(scheduler().now() + time_of(*duration));
  return 0;
}

int sched_yield() {
  if (!current_fiber()) return SYSTEMS(sched_yield)();
  enter("sched_yield");
  scheduler().block(scheduler().now() + microsecond);
  return 0;
}

// --- threads ---

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  if (!current_fiber()) return SYSTEMS(pthread_create)(thread, attributes, body, argument);
  Process& process = *enter("pthread_create").process;
  *thread = reinterpret_cast<pthread_t>(&scheduler().start(process, [body, argument] { body(argument); }));
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  if (!current_fiber()) return SYSTEMS(pthread_join)(thread, result);
  Fiber& own = enter("pthread_join");
  Fiber& other = *fiber_of(thread);
  other.joined_by = &own;
  while (other.state != Fiber::State::ended) scheduler().block(never);
  return 0;
}

int pthread_detach(pthread_t thread) { return current_fiber() ? 0 : SYSTEMS(pthread_detach)(thread); }

pthread_t pthread_self() {
  return current_fiber() ? reinterpret_cast<pthread_t>(current_fiber()) : SYSTEMS(pthread_self)();
}

int pthread_setname_np(pthread_t thread, const char* name) {
  return current_fiber() ? 0 : SYSTEMS(pthread_setname_np)(thread, name);
}

int pthread_once(pthread_once_t* control, void (*body)()) {
  while (current_fiber() && *control == once_runs) scheduler().wait_at(control, never);
  if (*control == once_is_done) return 0;
  *control = once_runs;
  int after = 0;
  const auto end = [&] {
    *control = after;
    if (current_fiber()) scheduler().wake_all_at(control);
  };
  try {
    body();
    after = once_is_done;
  } catch (...) {
    end();
    throw;
  }
  end();
  return 0;
}

// A process of one thread, outside of the simulation, needs no locks.
int pthread_mutex_lock(pthread_mutex_t* mutex) { return current_fiber() ? take_lock(mutex, never) : 0; }

int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t, const timespec* until) {
  return current_fiber() ? take_lock(mutex, time_of(*until)) : 0;
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  if (!current_fiber()) return 0;
  enter("pthread_mutex_trylock");
  if (mutex->__data.__lock != 0) return EBUSY;
  hold(mutex);
  return 0;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  auto& lock = mutex->__data;
  if (!current_fiber()) return 0;
  if (lock.__count > 0) {
    --lock.__count;
    return 0;
  }
  lock.__lock = lock.__owner = 0;
  if (lock.__nusers > 0) scheduler().wake_one_at(mutex);
  return 0;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  enter("pthread_cond_wait");
  return wait_on(condition, mutex, never);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  enter("pthread_cond_timedwait");
  return wait_on(condition, mutex, time_of(*until) - static_cast<Time>(first_day_s) * second);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  if (clock == CLOCK_REALTIME) return ::pthread_cond_timedwait(condition, mutex, until);
  enter("pthread_cond_clockwait");
  return wait_on(condition, mutex, time_of(*until));
}

int pthread_cond_signal(pthread_cond_t* condition) {
  if (current_fiber()) scheduler().wake_one_at(condition);
  return 0;
}

int pthread_cond_broadcast(pthread_cond_t* condition) {
  if (current_fiber()) scheduler().wake_all_at(condition);
  return 0;
}

// No simulated process forks.
int __register_atfork(void (*)(), void (*)(), void (*)(), void*) { return 0; }

// --- sockets ---

int socket(int family, int type, int protocol) {
  if (!current_fiber()) return SYSTEMS(socket)(family, type, protocol);
  enter("socket");
  return answer(family == AF_INET ? network().open_socket() : -EAFNOSUPPORT);
}

int bind(int fd, const sockaddr* address, socklen_t length) {
  if (!Network::has(fd)) return SYSTEMS(bind)(fd, address, length);
  enter("bind");
  return answer(network().bind(fd, ipv4(address)));
}

int listen(int fd, int backlog) {
  if (!Network::has(fd)) return SYSTEMS(listen)(fd, backlog);
  enter("listen");
  return answer(network().listen(fd, backlog));
}

int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  if (!Network::has(fd)) return SYSTEMS(accept4)(fd, address, length, flags);
  enter("accept4");
  return answer(network().accept(fd));
}

int connect(int fd, const sockaddr* address, socklen_t length) {
  if (!Network::has(fd)) return SYSTEMS(connect)(fd, address, length);
  enter("connect");
  return answer(network().connect(fd, ipv4(address)));
}

int shutdown(int fd, int how) {
  if (!Network::has(fd)) return SYSTEMS(shutdown)(fd, how);
  enter("shutdown");
  return answer(network().shutdown(fd));
}

ssize_t send(int fd, const void* data, std::size_t bytes, int flags) {
  if (!Network::has(fd)) return SYSTEMS(send)(fd, data, bytes, flags);
  enter("send");
  const iovec piece{const_cast<void*>(data), bytes};
  return answer(network().send(fd, {&piece, 1}));
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (!Network::has(fd)) return SYSTEMS(sendmsg)(fd, message, flags);
  enter("sendmsg");
  return answer(network().send(fd, {message->msg_iov, message->msg_iovlen}));
}

ssize_t recv(int fd, void* data, std::size_t bytes, int flags) {
  if (!Network::has(fd)) return SYSTEMS(recv)(fd, data, bytes, flags);
  enter("recv");
  const iovec piece{data, bytes};
  return answer(network().receive(fd, {&piece, 1}, (flags & MSG_PEEK) != 0));
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  if (!Network::has(fd)) return SYSTEMS(recvmsg)(fd, message, flags);
  enter("recvmsg");
  message->msg_controllen = 0;
  message->msg_flags = 0;
  return answer(network().receive(fd, {message->msg_iov, message->msg_iovlen}, (flags & MSG_PEEK) != 0));
}

int getsockname(int fd, sockaddr* address, socklen_t* length) {
  return Network::has(fd) ? tell_name(fd, false, address, length) : SYSTEMS(getsockname)(fd, address, length);
}

int getpeername(int fd, sockaddr* address, socklen_t* length) {
  return Network::has(fd) ? tell_name(fd, true, address, length) : SYSTEMS(getpeername)(fd, address, length);
}

int getsockopt(int fd, int level, int option, void* value, socklen_t* length) {
  if (!Network::has(fd)) return SYSTEMS(getsockopt)(fd, level, option, value, length);
  return answer(network().get_option(fd, level, option, value, *length));
}

int setsockopt(int fd, int level, int option, const void* value, socklen_t length) {
  if (!Network::has(fd)) return SYSTEMS(setsockopt)(fd, level, option, value, length);
  return answer(network().set_option(fd, level, option, value));
}

int ioctl(int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* const value = va_arg(arguments, void*);
  va_end(arguments);
  if (!Network::has(fd)) return SYSTEMS(ioctl)(fd, request, value);
  if (request == SIOCGIFFLAGS) {
    static_cast<ifreq*>(value)->ifr_flags = IFF_UP | IFF_RUNNING;
    return 0;
  }
  if (request != SIOCOUTQ && request != SIOCOUTQNSD) return answer(-ENOTTY);
  const int bytes = network().unsent_bytes(fd);
  if (bytes < 0) return answer(bytes);
  *static_cast<int*>(value) = request == SIOCOUTQ ? bytes : 0;
  return 0;
}

// --- other descriptors ---

int eventfd(unsigned count, int flags) {
  return current_fiber() ? network().open_event(count) : SYSTEMS(eventfd)(count, flags);
}

int timerfd_create(clockid_t clock, int flags) {
  return current_fiber() ? network().open_timer() : SYSTEMS(timerfd_create)(clock, flags);
}

int timerfd_settime(int fd, int flags, const itimerspec* when, itimerspec* before) {
  if (!Network::has(fd)) return SYSTEMS(timerfd_settime)(fd, flags, when, before);
  const Time at = time_of(when->it_value);
  return answer(network().set_timer(fd, at == 0 ? never : at));
}

int epoll_create1(int flags) { return current_fiber() ? network().open_epoll() : SYSTEMS(epoll_create1)(flags); }

int epoll_ctl(int epoll, int operation, int fd, epoll_event* event) {
  if (!Network::has(epoll)) return SYSTEMS(epoll_ctl)(epoll, operation, fd, event);
  return answer(network().control_epoll(epoll, operation, fd, event));
}

int epoll_wait(int epoll, epoll_event* events, int count, int timeout_ms) {
  if (!Network::has(epoll)) return SYSTEMS(epoll_wait)(epoll, events, count, timeout_ms);
  enter("epoll_wait");
  return answer(network().wait_epoll(epoll, {events, static_cast<std::size_t>(count)}, after_ms(timeout_ms)));
}

int poll(pollfd* fds, nfds_t count, int timeout_ms) {
  if (!current_fiber()) return SYSTEMS(poll)(fds, count, timeout_ms);
  enter("poll");
  return answer(network().poll({fds, count}, after_ms(timeout_ms)));
}

int ppoll(pollfd* fds, nfds_t count, const timespec* timeout, const sigset_t* signals) {
  if (!current_fiber()) return SYSTEMS(ppoll)(fds, count, timeout, signals);
  enter("ppoll");
  return answer(network().poll({fds, count}, timeout ? scheduler().now() + time_of(*timeout) : never));
}

ssize_t read(int fd, void* data, std::size_t bytes) {
  if (!Network::has(fd)) return SYSTEMS(read)(fd, data, bytes);
  enter("read");
  return answer(network().read_count(fd, *static_cast<std::uint64_t*>(data)));
}

ssize_t write(int fd, const void* data, std::size_t bytes) {
  if (!Network::has(fd)) return SYSTEMS(write)(fd, data, bytes);
  enter("write");
  return answer(network().add_count(fd, *static_cast<const std::uint64_t*>(data)));
}

int close(int fd) {
  if (!Network::has(fd)) return SYSTEMS(close)(fd);
  enter("close");
  return answer(network().close(fd));
}

// --- the host ---

int gethostname(char* name, std::size_t bytes) {
  if (!current_fiber()) return SYSTEMS(gethostname)(name, bytes);
  std::snprintf(name, bytes, "n%d", current_fiber()->process->number);
  return 0;
}

pid_t getpid() { return current_fiber() ? 1000 + current_fiber()->process->number : SYSTEMS(getpid)(); }

// Every process has a network of its own.
int stat(const char* path, struct stat* found) {
  const int result = SYSTEMS(stat)(path, found);
  if (result == 0 && current_fiber() && std::strcmp(path, "/proc/thread-self/ns/net") == 0)
    found->st_ino = static_cast<ino_t>(1 + current_fiber()->process->number);
  return result;
}

int getifaddrs(ifaddrs** list) {
  if (!current_fiber()) return SYSTEMS(getifaddrs)(list);
  struct Nic {
    ifaddrs entry;
    sockaddr_in address, mask;
    char name[8];
  };
  auto* const nic = static_cast<Nic*>(std::calloc(1, sizeof(Nic)));
  if (!nic) return answer(-ENOMEM);
  std::strcpy(nic->name, nic_name);
  nic->address.sin_family = AF_INET;
  nic->address.sin_addr.s_addr = Network::address_of(current_fiber()->process->number);
  nic->mask = nic->address;
  nic->mask.sin_addr.s_addr = htonl(0xFF000000U);
  nic->entry.ifa_name = nic->name;
  nic->entry.ifa_flags = IFF_UP | IFF_RUNNING;
  nic->entry.ifa_addr = reinterpret_cast<sockaddr*>(&nic->address);
  nic->entry.ifa_netmask = reinterpret_cast<sockaddr*>(&nic->mask);
  *list = &nic->entry;
  return 0;
}

void freeifaddrs(ifaddrs* list) {
  if (current_fiber())
    std::free(list);
  else
    SYSTEMS(freeifaddrs)(list);
}

int getrlimit(__rlimit_resource_t what, rlimit* limit) {
  if (!current_fiber() || what != RLIMIT_NOFILE) return SYSTEMS(getrlimit)(what, limit);
  *limit = {open_files, open_files};
  return 0;
}

ssize_t getrandom(void* data, std::size_t bytes, unsigned flags) {
  if (!current_fiber()) return SYSTEMS(getrandom)(data, bytes, flags);
  auto* const begin = static_cast<unsigned char*>(data);
  std::generate(begin, begin + bytes, [] { return static_cast<unsigned char>(scheduler().below(256)); });
  return static_cast<ssize_t>(bytes);
}

// std::random_device::operator()
unsigned _ZNSt13random_device9_M_getvalEv(void*) { return static_cast<unsigned>(scheduler().random()); }

}  // extern "C"
