// Socket: addresses, and sockets bound to one NIC (its address and, where permitted, its device).
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/options.hpp"

struct tcp_info;  // of <linux/tcp.h>, which does not bear <netinet/tcp.h> beside it

namespace holmes {

// A numeric IPv4 or IPv6 address with a port.
class SocketAddress {
public:
  // `interface` scopes an IPv6 link-local address. Throws UsageError where `address` is not numeric.
  static SocketAddress parse(const std::string& address, std::uint16_t port, const std::string& interface = "");
  // What getsockname and getpeername say; nothing where they fail.
  static std::optional<SocketAddress> local_of(int fd);
  static std::optional<SocketAddress> remote_of(int fd);
  static SocketAddress from(const sockaddr* address, socklen_t length);

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }
  std::uint16_t port() const;
  std::string host() const;  // "10.0.0.1", "fe80::1%eth0"
  std::string text() const;  // "10.0.0.1:40000", "[fe80::1%eth0]:40000", "unix" for a Unix socket
  bool same_host(const SocketAddress& other) const;

private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

// Throws NicError where the interface does not exist, is down, has no carrier or does not have the address; it names
// the value, what there is, and the fix.
void check_nic(const NicBinding& nic);

// Of an address of this host, which the host reaches over its loopback device: ", as ... is down: ..." where that is
// so, else nothing.
std::string why_not_itself(const SocketAddress& address);

// Ties a socket to a device. False where the system does not permit it to this user.
bool bind_to_device(int fd, const std::string& interface);

// A socket, and whether it is tied to its NIC's device.
struct BoundSocket {
  UniqueFd fd;
  bool device_bound = false;
};

// The code point of its IP packets. Sockets that a listener accepts have the listener's.
void set_dscp(int fd, int dscp);

// A non-blocking listening TCP socket on the NIC's address. Throws NicError, or SystemError where no port of
// `port_range` is free.
BoundSocket listen_on_nic(const NicBinding& nic, bool bind_device,
                          const std::optional<std::pair<std::uint16_t, std::uint16_t>>& port_range);

// A non-blocking TCP socket on the NIC's address whose connection to `remote` is under way or made; where it failed at
// once, no socket and the errno. `congestion`: see set_congestion_control; empty: the system's. `dscp`: see set_dscp.
// Throws SystemError where no socket can be had.
BoundSocket connect_from_nic(const NicBinding& nic, bool bind_device, const SocketAddress& remote,
                             const std::string& congestion, std::optional<int> dscp, int& system_errno);

// Abstract Unix sockets (no name in the file system): seen by processes of the same network namespace only.
UniqueFd listen_on_unix(const std::string& token);
UniqueFd connect_to_unix(const std::string& token, int& system_errno);

// Accepts one connection, non-blocking and close-on-exec; no socket where there is none or it has gone already. Throws
// SystemError where descriptors or memory are short.
UniqueFd accept_one(int listener);

// TCP_NODELAY and keepalive: a dead host is noticed within about a minute, also by a rank that only receives. A dead
// peer may hold sent data back for `unacknowledged` at most; absent: as long as the system tries. (Not for a socket
// whose peer may stop reading: the limit also counts while its window is closed.)
void tune_socket(int fd, std::optional<std::chrono::milliseconds> unacknowledged);
// False where the system does not know the algorithm or does not permit it.
bool set_congestion_control(int fd, const std::string& algorithm);
// Empty where it is no TCP socket.
std::string congestion_control_of(int fd);
// Whether an algorithm takes a lost packet for congestion: all that systems bring do, but bbr.
bool heeds_loss(const std::string& algorithm);
// Between ranks of one kernel: mostly no wire limits the rate there, and a pacing algorithm (bbr) costs up to half of
// it. It must be set before the connection stands: a socket that was paced once stays paced. cubic, which begins more
// carefully where something limits the rate after all, or reno, where this user may not have it.
const std::string& unpaced_congestion_control();
// What new sockets get; empty where the system does not tell.
std::string default_congestion_control();

// A round trip from which on a path is far: what is under way on it is more than what buffers usually hold.
inline constexpr std::chrono::microseconds far_round_trip{2000};
// The shortest round trip so far; nothing where it is not known.
std::optional<std::chrono::microseconds> shortest_round_trip(int fd);
// For a path that is far: bbr, where this user may have it, as an algorithm that takes every loss for congestion
// carries a small part of the rate there (`is_algorithm_given`: it stays as it is), and as large a buffer as the system
// allows.
void suit_far_path(int fd, bool is_algorithm_given);
// Whether suit_far_path can have bbr.
bool has_bbr();
// Whether one connection cannot carry 10 Gbit/s over so long a round trip: what is under way is kept in its buffer.
bool is_bounded_by_buffer(std::chrono::microseconds round_trip);

template <class Value>
bool set_option(int fd, int level, int option, const Value& value) {
  return ::setsockopt(fd, level, option, &value, sizeof(value)) == 0;
}

// What the kernel knows of a TCP connection; older kernels fill less. Nothing where it is none.
std::optional<::tcp_info> tcp_info_of(int fd);

// Where bbr is the algorithm: whether it is in its start yet, and the rate that it takes the path for.
struct BbrLook {
  bool is_starting = false;
  std::uint64_t bytes_per_s = 0;
};
std::optional<BbrLook> bbr_of(int fd);

// Whether what was sent and not acknowledged, or waits to be sent, takes more than half of the sending buffer. True
// where the system does not tell.
bool is_buffer_full(int fd);

// Whether the system sends again what the peer's does not acknowledge.
bool is_unanswered(int fd);

// Whether a call on a non-blocking socket is to be tried again.
inline bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// The pending error of a socket (SO_ERROR), 0 where there is none.
int socket_error(int fd);

}  // namespace holmes
