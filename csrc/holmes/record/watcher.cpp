#include "holmes/record/watcher.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/unique_fd.hpp"
#include "holmes/record/debug_socket.hpp"
#include "holmes/record/dump.hpp"

namespace holmes {
namespace {

// How often the request file is looked at: one stat, of a folder that may be on the network.
constexpr int request_poll_ms = 1000;

std::atomic<int> signal_fd{-1};
std::atomic<pid_t> signal_owner{0};
struct sigaction earlier_action;

// Async-signal-safe.
void on_signal(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const std::uint64_t one = 1;
  // A forked child shares the descriptor, but its parent is not meant.
  if (signal_owner.load() == ::getpid()) [[maybe_unused]]
    const ssize_t bytes = ::write(signal_fd.load(), &one, sizeof one);
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

// When the request file was last changed; {} where there is none.
timespec request_time() {
  const auto folder = dump_folder();
  struct stat info{};
  if (!folder || ::stat(request_file(*folder).c_str(), &info) != 0) return {};
  return info.st_mtim;
}

class Watcher {
public:
  explicit Watcher(const Env& env) : signalled_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    try {
      socket_ = std::make_unique<DebugSocket>(debug_socket_folder());
    } catch (const HolmesError& error) {
      log(LogLevel::info, std::nullopt, std::string("holmes debug cannot ask this process: ") + error.what());
    }
    if (signalled_ && env.flight_recorder_signal != 0) handle_signal(env.flight_recorder_signal, signalled_.get());
    last_request_ = request_time();
    std::thread thread([this] { run(); });
    ::pthread_setname_np(thread.native_handle(), "holmes-watch");
    thread.detach();
  }

  std::uint64_t epoch() const { return epoch_; }
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
    while (true) {
      pollfd fds[2] = {{signalled_.get(), POLLIN, 0}, {socket_ ? socket_->fd() : -1, POLLIN, 0}};
      ::poll(fds, 2, dump_folder() ? request_poll_ms : -1);
      if (fds[0].revents) {
        std::uint64_t ignored;
        [[maybe_unused]] const ssize_t bytes = ::read(signalled_.get(), &ignored, sizeof ignored);
        dump("signal");
      }
      if (fds[1].revents) serve();
      const timespec request = request_time();
      if (request.tv_sec != last_request_.tv_sec || request.tv_nsec != last_request_.tv_nsec) {
        last_request_ = request;
        dump("asked for");
      }
    }
  }

  void serve() const {
    try {
      socket_->serve(answer);
    } catch (const std::exception& error) {
      log(LogLevel::warn, std::nullopt, std::string("no flight record for holmes debug: ") + error.what());
    }
  }

  std::uint64_t epoch_ = fork_epoch();
  UniqueFd signalled_;
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
  if (found && found->epoch() == fork_epoch()) return;
  // A lock could be held for ever in a forked child; two threads may be here only when a process begins.
  static std::atomic<std::uint64_t> begun_epoch{UINT64_MAX};
  if (begun_epoch.exchange(fork_epoch()) == fork_epoch()) return;
  current.store(new Watcher(env));
  static const int registered = std::atexit([] {
    if (const Watcher* own = current.load()) own->remove_name();
  });
  (void)registered;
}

}  // namespace holmes
