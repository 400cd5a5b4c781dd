#include "holmes/record/watcher.hpp"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/thread.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/link_use.hpp"

namespace holmes {
namespace {

constexpr const char* suffix = ".sock";
constexpr std::size_t longest_host = 32;
constexpr int most_visited = 1000;   // of the folder's files, when looking for what is left of others
constexpr std::time_t fresh_s = 10;  // a socket that young may be about to listen
constexpr timeval send_timeout{2, 0};

[[noreturn]] void refuse(const std::string& what) {
  throw SystemError(what + ": " + errno_text(errno), {.system_errno = errno});
}

void make_private_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) refuse("cannot make the folder " + folder);
  struct stat info{};
  if (::lstat(folder.c_str(), &info) != 0) refuse("cannot look at " + folder);
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0)
    throw SystemError(folder + " is not a folder of this user alone (mode 0700); remove it or mend its permissions");
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path))
    throw SystemError("the path " + path + " is longer than a socket's may be (" +
                      std::to_string(sizeof(address.sun_path) - 1) + "); set XDG_RUNTIME_DIR to a shorter one");
  path.copy(address.sun_path, path.size());
  return address;
}

bool has_listener(const std::string& path) {
  UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = address_of(path);
  return ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
         errno != ECONNREFUSED;
}

// A killed process cannot remove its socket.
void remove_stale(const std::string& folder) {
  DIR* entries = ::opendir(folder.c_str());
  if (!entries) return;
  const std::time_t now = ::time(nullptr);
  for (int visited = 0; visited < most_visited; ++visited) {
    const dirent* entry = ::readdir(entries);
    if (!entry) break;
    const std::string path = folder + "/" + entry->d_name;
    struct stat info{};
    if (!path.ends_with(suffix) || ::lstat(path.c_str(), &info) != 0 || !S_ISSOCK(info.st_mode)) continue;
    if (now - info.st_mtime > fresh_s && !has_listener(path)) ::unlink(path.c_str());
  }
  ::closedir(entries);
}

std::string file_name() {
  std::string host = host_name().substr(0, longest_host);
  for (char& character : host)
    if (character == '/') character = '_';
  // Nodes of two testbeds may have equal names and process numbers.
  return std::to_string(::getpid()) + "-" + host + "-" + std::to_string(std::random_device{}() % 100'000) + suffix;
}

// How soon after its question an asker knows, and hangs up, that it meant another process.
constexpr int hang_up_ms = 20;

// The UNIX socket over which a process gives its flight record to its own user. One thread.
class DebugSocket {
public:
  // Listens in `folder`, which is made where missing and must be this user's alone. Removes what ended processes left
  // there. Throws SystemError.
  explicit DebugSocket(const std::string& folder);

  int fd() const { return listener_.get(); }
  const std::string& path() const { return path_; }
  // Takes one connection and gives it `text`, for two seconds at most; other users' are refused.
  void serve(std::string (*text)()) const;

private:
  std::string path_;
  UniqueFd listener_;
  std::unique_ptr<UninheritedSockets> uninherited_;
};

DebugSocket::DebugSocket(const std::string& folder) {
  make_private_folder(folder);
  remove_stale(folder);
  path_ = folder + "/" + file_name();
  const sockaddr_un address = address_of(path_);
  listener_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener_) refuse("cannot make a socket");
  uninherited_ = std::make_unique<UninheritedSockets>(std::vector<int>{listener_.get()});
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    refuse("cannot bind " + path_);
  if (::chmod(path_.c_str(), 0600) != 0 || ::listen(listener_.get(), 8) != 0) refuse("cannot listen on " + path_);
}

void DebugSocket::serve(std::string (*text)()) const {
  UniqueFd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) return;
  ucred who{};
  socklen_t length = sizeof who;
  if (::getsockopt(client.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) return;
  if (who.uid != ::geteuid() && who.uid != 0) return;
  // Who meant another process has gone: a record, which takes tenths of a second, would keep the next one waiting.
  pollfd asker{client.get(), 0, 0};  // POLLHUP; one that only has nothing more to say still listens
  if (::poll(&asker, 1, hang_up_ms) > 0) return;
  ::setsockopt(client.get(), SOL_SOCKET, SO_SNDTIMEO, &send_timeout, sizeof send_timeout);
  const std::string answer = text();
  for (std::size_t done = 0; done < answer.size();) {
    const ssize_t bytes = ::send(client.get(), answer.data() + done, answer.size() - done, MSG_NOSIGNAL);
    if (bytes <= 0) return;
    done += static_cast<std::size_t>(bytes);
  }
}

// --- the thread ---

// How often the request file is looked at: one stat, of a folder that may be on the network.
constexpr std::chrono::seconds request_interval{1};

std::atomic<int> signal_fd{-1};
std::atomic<bool> is_signalled{false};
std::atomic<pid_t> signal_owner{0};
struct sigaction earlier_action;

// Async-signal-safe.
void on_signal(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const std::uint64_t one = 1;
  // A forked child shares the descriptor, but its parent is not meant.
  if (signal_owner.load() == ::getpid()) {
    is_signalled.store(true);
    [[maybe_unused]] const ssize_t bytes = ::write(signal_fd.load(), &one, sizeof one);
  }
  if (earlier_action.sa_flags & SA_SIGINFO) {
    if (earlier_action.sa_sigaction) earlier_action.sa_sigaction(number, info, context);
  } else if (earlier_action.sa_handler != SIG_DFL && earlier_action.sa_handler != SIG_IGN) {
    earlier_action.sa_handler(number);
  }
  errno = saved_errno;
}

void handle_signal(int number, int fd) {
  signal_fd.store(fd);
  signal_owner.store(::getpid());
  struct sigaction action{};
  struct sigaction current{};
  ::sigaction(number, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_signal) return;
  earlier_action = current;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigaction(number, &action, nullptr);
}

std::string answer() { return process_record_json("asked for", record_patience, record_settle); }

// When the request file was last changed; {} where there is none. Nothing where memory is short for a moment.
std::optional<timespec> request_time() {
  std::optional<timespec> found;
  where_memory_allows([&] {
    const auto folder = dump_folder();
    struct stat info{};
    const bool is_there = folder && ::stat(request_file(*folder).c_str(), &info) == 0;
    found = is_there ? info.st_mtim : timespec{};
  });
  return found;
}

// Rounded up; -1: there is no end.
int milliseconds_until(Clock::time_point time) {
  if (time == Clock::time_point::max()) return -1;
  return static_cast<int>(
      std::max<std::int64_t>(0, std::chrono::ceil<std::chrono::milliseconds>(time - Clock::now()).count()));
}

class Watcher {
public:
  explicit Watcher(const Env& env) : woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    try {
      socket_ = std::make_unique<DebugSocket>(debug_socket_folder());
    } catch (const HolmesError& error) {
      log(LogLevel::info, std::nullopt, std::string("holmes debug cannot ask this process: ") + error.what());
    }
    last_request_ = request_time().value_or(timespec{});
    std::thread thread = start_thread("answers holmes debug", [this] { run(); });
    ::pthread_setname_np(thread.native_handle(), "holmes-watch");
    thread.detach();
    // Last: the handler writes to the descriptor for as long as the process lives, and where there is no thread it
    // closes.
    if (woken_ && env.flight_recorder_signal != 0) handle_signal(env.flight_recorder_signal, woken_.get());
  }

  std::uint64_t epoch() const { return epoch_; }
  // It may sleep: there are connections now.
  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t bytes = ::write(woken_.get(), &one, sizeof one);
  }
  // At the end of the process.
  void remove_name() const {
    if (epoch_ == fork_epoch() && socket_) ::unlink(socket_->path().c_str());
  }

private:
  [[noreturn]] void run() {
    // Signals are for the program's own threads.
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
    constexpr auto never = Clock::time_point::max();
    auto look_at = Clock::now(), ask_at = look_at;
    while (true) {
      pollfd fds[2] = {{woken_.get(), POLLIN, 0}, {socket_ ? socket_->fd() : -1, POLLIN, 0}};
      ::poll(fds, 2, milliseconds_until(std::min(look_at, has_dump_folder() ? ask_at : never)));
      if (fds[0].revents) {
        std::uint64_t ignored;
        [[maybe_unused]] const ssize_t bytes = ::read(woken_.get(), &ignored, sizeof ignored);
        if (is_signalled.exchange(false)) dump("signal");
      }
      if (fds[0].revents || Clock::now() >= look_at) {
        look_at = Clock::now() + request_interval;
        where_memory_allows([&] { look_at = look_at_links(); });
      }
      if (fds[1].revents) serve();
      if (Clock::now() < ask_at) continue;
      ask_at = Clock::now() + request_interval;
      const auto request = request_time();
      if (request && (request->tv_sec != last_request_.tv_sec || request->tv_nsec != last_request_.tv_nsec)) {
        last_request_ = *request;
        dump("asked for");
      }
    }
  }

  void serve() const {
    try {
      socket_->serve(answer);
    } catch (const std::exception& error) {
      where_memory_allows([&] {
        log(LogLevel::warn, std::nullopt, std::string("no flight record for holmes debug: ") + error.what());
      });
    }
  }

  std::uint64_t epoch_ = fork_epoch();
  UniqueFd woken_;
  std::unique_ptr<DebugSocket> socket_;
  timespec last_request_{};
};

// Never destroyed: its thread goes on to the end of the process. A forked child gets one of its own.
std::atomic<Watcher*> current{nullptr};

}  // namespace

std::string debug_socket_folder() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  struct stat info{};
  if (runtime && *runtime == '/' && ::stat(runtime, &info) == 0 && info.st_uid == ::geteuid())
    return std::string(runtime) + "/holmes";
  return "/tmp/holmes-" + std::to_string(::geteuid());
}

void start_watcher(const Env& env) {
  if (env.flight_recorder_operations == 0) return;
  set_dump_folder(env.flight_recorder_folder);
  Watcher* found = current.load();
  if (found && found->epoch() == fork_epoch()) return found->wake();
  // A lock could be held for ever in a forked child; two threads may be here only when a process begins.
  static std::atomic<std::uint64_t> begun_epoch{UINT64_MAX};
  if (begun_epoch.exchange(fork_epoch()) == fork_epoch()) return;
  try {
    current.store(new Watcher(env));
  } catch (const std::exception& error) {  // neither memory nor a thread is left: the next communicator tries again
    begun_epoch.store(UINT64_MAX);
    where_memory_allows([&] {
      log(LogLevel::warn, std::nullopt, std::string("holmes debug cannot ask this process: ") + error.what());
    });
    return;
  }
  static const int registered = std::atexit([] {
    if (const Watcher* own = current.load()) own->remove_name();
  });
  (void)registered;
}

}  // namespace holmes
