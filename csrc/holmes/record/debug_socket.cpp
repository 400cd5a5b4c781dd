#include "holmes/record/debug_socket.hpp"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"

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

}  // namespace

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
  ::setsockopt(client.get(), SOL_SOCKET, SO_SNDTIMEO, &send_timeout, sizeof send_timeout);
  const std::string answer = text();
  for (std::size_t done = 0; done < answer.size();) {
    const ssize_t bytes = ::send(client.get(), answer.data() + done, answer.size() - done, MSG_NOSIGNAL);
    if (bytes <= 0) return;
    done += static_cast<std::size_t>(bytes);
  }
}

}  // namespace holmes
