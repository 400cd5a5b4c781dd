#include "wire.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <thread>

namespace fake_nccl {
namespace {

constexpr int poll_ms = 20;

struct Hello {
  int rank;
  int size;
  sockaddr_in address;
};

// Waits for `events`; false where `stop` or the socket has failed.
bool wait_for(int fd, short events, const std::atomic<bool>& stop) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, poll_ms);
    if (stop) return false;
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

bool read_all(int fd, void* data, std::size_t bytes, const std::atomic<bool>& stop) {
  for (std::size_t done = 0; done < bytes;) {
    if (!wait_for(fd, POLLIN, stop)) return false;
    const ssize_t n = ::recv(fd, static_cast<char*>(data) + done, bytes - done, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) done += static_cast<std::size_t>(n);
  }
  return true;
}

bool write_all(int fd, const void* data, std::size_t bytes) {
  return ::send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);  // small ones only
}

int listen_at(sockaddr_in& address) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t length = sizeof(address);
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd, 256) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return -1;
  return fd;
}

// A block's title and small blocks do not wait for an acknowledgement.
void send_at_once(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

int connect_to(const sockaddr_in& address) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    send_at_once(fd);
    return fd;
  }
  if (fd >= 0) ::close(fd);
  return -1;
}

void serve_root(int listener) {
  const std::atomic<bool> never{false};
  std::vector<std::pair<int, Hello>> callers;
  do {
    const int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Hello hello{};
    if (fd < 0 || !read_all(fd, &hello, sizeof(hello), never)) break;
    callers.emplace_back(fd, hello);
  } while (callers.size() < static_cast<std::size_t>(callers.front().second.size));
  if (callers.empty()) return;
  std::vector<sockaddr_in> table(static_cast<std::size_t>(callers.front().second.size));
  for (const auto& [fd, hello] : callers) table[static_cast<std::size_t>(hello.rank)] = hello.address;
  for (const auto& [fd, hello] : callers) {
    write_all(fd, table.data(), table.size() * sizeof(sockaddr_in));
    ::close(fd);
  }
  ::close(listener);
}

// Whether a list of NCCL's syntax, "[^][=]name,...", admits this interface; names are prefixes without "=".
bool admits(std::string list, const std::string& interface) {
  const bool is_excluding = list.starts_with("^");
  if (is_excluding) list.erase(0, 1);
  const bool is_exact = list.starts_with("=");
  if (is_exact) list.erase(0, 1);
  bool is_named = false;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string name = list.substr(begin, end - begin);
    is_named = is_named || (is_exact ? interface == name : !name.empty() && interface.starts_with(name));
    begin = end + 1;
  }
  return is_named != is_excluding;
}

}  // namespace

// As NCCL: the first one that the list admits; without a list InfiniBand's, else any but a container's and loopback.
sockaddr_in interface_address() {
  const char* value = std::getenv("NCCL_SOCKET_IFNAME");
  const std::vector<std::string> lists = value == nullptr
                                             ? std::vector<std::string>{"ib", "^docker,lo,virbr", "docker", "lo"}
                                             : std::vector<std::string>{value};
  sockaddr_in address{};
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return address;
  for (const std::string& list : lists)
    for (const ifaddrs* one = all; one != nullptr && address.sin_family == 0; one = one->ifa_next) {
      if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET || !(one->ifa_flags & IFF_RUNNING)) continue;
      if (admits(list, one->ifa_name)) std::memcpy(&address, one->ifa_addr, sizeof(address));
    }
  ::freeifaddrs(all);
  address.sin_port = 0;
  return address;
}

bool start_root(sockaddr_in& address) {
  const int listener = listen_at(address);
  if (listener < 0) return false;
  std::thread(serve_root, listener).detach();
  return true;
}

std::vector<int> connect_all(const sockaddr_in& root, int rank, int size, const std::atomic<bool>& stop) {
  Hello hello{rank, size, interface_address()};
  const int listener = listen_at(hello.address);
  const int caller = connect_to(root);
  std::vector<sockaddr_in> table(static_cast<std::size_t>(size));
  std::vector<int> sockets(2 * static_cast<std::size_t>(size), -1);
  bool good = listener >= 0 && caller >= 0 && write_all(caller, &hello, sizeof(hello)) &&
              read_all(caller, table.data(), table.size() * sizeof(sockaddr_in), stop);
  if (caller >= 0) ::close(caller);
  for (int peer = 0; good && peer < rank; ++peer)
    for (const int place : {peer, peer + size}) {
      const int own = rank + place - peer;
      const int fd = good ? connect_to(table[static_cast<std::size_t>(peer)]) : -1;
      good = fd >= 0 && write_all(fd, &own, sizeof(own));
      sockets[static_cast<std::size_t>(place)] = fd;
    }
  for (int missing = 2 * (size - 1 - rank); good && missing > 0; --missing) {
    int place = -1;
    good = wait_for(listener, POLLIN, stop);
    const int fd = good ? ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    good = fd >= 0 && read_all(fd, &place, sizeof(place), stop) && place % size > rank && place < 2 * size;
    if (good) send_at_once(sockets[static_cast<std::size_t>(place)] = fd);
  }
  if (listener >= 0) ::close(listener);
  if (good) return sockets;
  for (const int fd : sockets)
    if (fd >= 0) ::close(fd);
  return {};
}

bool transfer(const std::vector<int>& sockets, const std::vector<Transfer>& sends, const std::vector<Transfer>& recvs,
              const std::atomic<bool>& stop, PluginNet* plugin) {
  // Each block goes behind its size and operation.
  struct Stream {
    std::deque<Transfer> blocks;
    std::uint64_t announced = 0;
    std::size_t done = 0;  // of the front block, its size's bytes included
  };
  const std::size_t size = sockets.size() / 2;
  std::vector<Stream> out(size), in(size);
  std::vector<std::size_t> untaken(size);  // blocks that a peer's kernel has not begun to receive
  for (const Transfer& block : sends) {
    out[static_cast<std::size_t>(block.peer)].blocks.push_back(block);
    ++untaken[static_cast<std::size_t>(block.peer)];
  }
  for (const Transfer& block : recvs) in[static_cast<std::size_t>(block.peer)].blocks.push_back(block);
  constexpr std::size_t head = sizeof(std::uint64_t);
  bool has_moved = false;
  const auto move = [&](std::size_t peer, Stream& stream, bool is_send) {
    const int fd = sockets[peer], taken_fd = sockets[peer + size];
    const bool is_plugins = plugin != nullptr && plugin->has(static_cast<int>(peer));
    while (!stream.blocks.empty()) {
      const Transfer& block = stream.blocks.front();
      const std::uint64_t title = block.bytes << 8 | static_cast<std::uint64_t>(block.part);
      if (is_send) stream.announced = title;
      char* at = stream.done < head ? reinterpret_cast<char*>(&stream.announced) + stream.done
                                    : block.data + (stream.done - head);
      const std::size_t left = stream.done < head ? head - stream.done : head + block.bytes - stream.done;
      if (left > 0) {
        const ssize_t n = is_plugins ? plugin->move(static_cast<int>(peer), is_send, at, left)
                          : is_send  ? ::send(fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : ::recv(fd, at, left, MSG_DONTWAIT);
        if (n < 0 && (is_plugins || errno == EAGAIN || errno == EINTR)) return true;
        if (n <= 0) return false;
        has_moved = true;
        stream.done += static_cast<std::size_t>(n);
        constexpr char taken = 1;
        if (!is_send && stream.done == head && !write_all(taken_fd, &taken, sizeof(taken))) return false;
      }
      if (stream.done == head && stream.announced != title) return false;
      if (stream.done == head + block.bytes) {
        stream.blocks.pop_front();
        stream.done = 0;
      }
    }
    return true;
  };
  // A kernel that sends stays until the one that receives is there: nothing is buffered on the way.
  const auto hear = [&](std::size_t peer) {
    char bytes[64];
    while (untaken[peer] > 0) {
      const ssize_t n = ::recv(sockets[peer + size], bytes, std::min(sizeof(bytes), untaken[peer]), MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (n <= 0) return false;
      untaken[peer] -= static_cast<std::size_t>(n);
    }
    return true;
  };
  // Nothing of the plugin's may touch memory of a kernel that is over.
  const auto give_up = [&] {
    if (plugin != nullptr) plugin->give_up();
    return false;
  };
  for (;;) {
    std::vector<pollfd> waits;
    bool asks_plugin = false;
    has_moved = false;
    for (std::size_t peer = 0; peer < size; ++peer) {
      if (sockets[peer] < 0) continue;
      if (!move(peer, out[peer], true) || !move(peer, in[peer], false) || !hear(peer)) return give_up();
      const short events =
          static_cast<short>((out[peer].blocks.empty() ? 0 : POLLOUT) | (in[peer].blocks.empty() ? 0 : POLLIN));
      if (untaken[peer] > 0) waits.push_back({sockets[peer + size], POLLIN, 0});
      if (events == 0) continue;
      if (plugin != nullptr && plugin->has(static_cast<int>(peer)))
        asks_plugin = true;
      else
        waits.push_back({sockets[peer], events, 0});
    }
    if (waits.empty() && !asks_plugin) return true;
    if (stop) return give_up();
    if (!asks_plugin)
      ::poll(waits.data(), waits.size(), poll_ms);
    else if (!has_moved)
      ::usleep(50);  // who asks moves the bytes
  }
}

}  // namespace fake_nccl
