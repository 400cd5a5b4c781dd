// Network: sockets and the other descriptors that simulated processes wait for, and who sent how much. Every host has
// one process and one address. Functions return what the system call does, or the negative of its errno.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/scheduler.hpp"

namespace holmes::sim {

// What connections are for, by what is said on them first.
enum class Use : std::uint8_t { control, collective, p2p, store, unknown };
inline constexpr std::size_t uses = 5;

struct Traffic {
  std::array<std::uint64_t, uses> messages{}, bytes{};  // sent, the connections' handshakes apart
  std::uint64_t handshakes = 0;                         // messages of them
  std::uint64_t store_sets = 0;                         // of the store's messages
  std::size_t descriptors = 0;                          // open now
  std::array<std::uint64_t, uses> connections{};        // made, by either side
};

// How messages travel. Those of one connection stay in order.
struct Paths {
  Time latency = 20 * microsecond;  // at least
  Time jitter = 80 * microsecond;   // more at random, at most
  Time tick = 5 * microsecond;      // of arrivals: what comes together is seen together
  unsigned slow_of_1000 = 0;        // messages that take up to `slow` longer
  Time slow = 50 * millisecond;
  unsigned split_of_1000 = 50;  // messages of which a part arrives later
};

// Of every host; none that a machine has, so that nothing of the machine's own is found under it.
inline constexpr const char* nic_name = "sim0";

class Network {
public:
  explicit Network(const Paths& paths);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  static constexpr int first_descriptor = 1 << 20;
  static bool has(int fd) { return fd >= first_descriptor; }
  static in_addr_t address_of(int process) { return htonl(0x0A000001U + static_cast<unsigned>(process)); }
  Traffic& traffic(int process);
  std::uint64_t misuses() const { return misuses_; }

  // --- sockets ---
  int open_socket();
  int bind(int fd, const sockaddr_in& address);
  int listen(int fd, int backlog);
  int connect(int fd, const sockaddr_in& address);
  int accept(int fd);
  int shutdown(int fd);
  ssize_t send(int fd, std::span<const iovec> pieces);
  ssize_t receive(int fd, std::span<const iovec> pieces, bool peeks);
  // The own address, or the peer's.
  int name(int fd, bool of_peer, sockaddr_in& address);
  int get_option(int fd, int level, int option, void* value, socklen_t& length);
  int set_option(int fd, int level, int option, const void* value);
  int unsent_bytes(int fd);

  // --- events and timers ---
  int open_event(std::uint64_t count);
  int open_timer();
  int set_timer(int fd, Time at);
  ssize_t read_count(int fd, std::uint64_t& count);
  ssize_t add_count(int fd, std::uint64_t count);

  // --- waiting ---
  int open_epoll();
  int control_epoll(int epoll, int operation, int fd, const epoll_event* event);
  int wait_epoll(int epoll, std::span<epoll_event> events, Time until);
  int poll(std::span<pollfd> fds, Time until);

  int close(int fd);
  // The system closes what the process has open; or, `silently`, the host is gone and nothing comes back from it.
  void end_process(int process, bool silently);

private:
  struct File;
  struct Socket;
  struct Listener;
  struct Event;
  struct Timer;
  struct Epoll;

  template <typename Kind>
  Kind* find(int fd);
  File* file(int fd);
  template <typename Kind>
  int add(std::unique_ptr<Kind> made);
  int own_process() const;
  void notify(File& changed);
  void close_now(File& closed);
  Time arrival(const Socket& at);
  void enqueue(Socket& to, Time arrives, std::string bytes, int end);
  void learn_use(Socket& from, Socket* to, std::span<const char> begin);
  static void deliver(std::uint64_t fd);
  static void arrive(std::uint64_t fd);
  static void establish(std::uint64_t fd);
  static void refuse(std::uint64_t fd);
  static void reset(std::uint64_t fd);
  static void expire(std::uint64_t fd);
  bool is_silent(int process) const { return silent_.contains(process); }
  static void ring(std::uint64_t fd);

  const Paths paths_;
  std::vector<std::unique_ptr<File>> files_;          // by descriptor; numbers are not used again
  std::unordered_map<std::uint64_t, int> listeners_;  // by address and port
  std::unordered_map<int, std::uint16_t> next_ports_;
  std::vector<Traffic> traffic_;
  std::set<int> silent_;       // hosts that are gone
  std::uint64_t misuses_ = 0;  // of descriptors that are closed, or another process's
};

// The one that there is.
Network& network();

}  // namespace holmes::sim
