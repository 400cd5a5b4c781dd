#include "holmes/transport/socket.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/inet_diag.h>
#include <linux/sock_diag.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/ioctl.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

UniqueFd open_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) {
    const int error = errno;
    throw SystemError("cannot open a socket: " + errno_text(error) + limit_text(error), {.system_errno = error});
  }
  return fd;
}

[[noreturn]] void throw_nic_error(const NicBinding& nic, const std::string& text, int system_errno) {
  throw NicError(
      "NIC " + nic.interface + " with address " + nic.address + ": " + text + ": " + errno_text(system_errno),
      {.nic = nic.interface, .system_errno = system_errno});
}

// The kernel tells of a carrier up to a second after an interface came up.
bool wait_for_carrier(const std::string& interface) {
  constexpr auto patience = std::chrono::seconds(2);
  constexpr auto interval = std::chrono::milliseconds(20);
  const auto deadline = Clock::now() + patience;
  const auto fd = open_socket(AF_INET);
  ifreq request{};
  interface.copy(request.ifr_name, sizeof(request.ifr_name) - 1);
  while (::ioctl(fd.get(), SIOCGIFFLAGS, &request) == 0) {
    if ((request.ifr_flags & IFF_RUNNING) != 0) return true;
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(interval);
  }
  return false;
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& token) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const auto length = std::min(token.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, token.data(), length);  // the zero byte in front makes it abstract
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

}  // namespace

SocketAddress SocketAddress::from(const sockaddr* address, socklen_t length) {
  SocketAddress result;
  result.length_ = std::min<socklen_t>(length, sizeof(result.storage_));
  std::memcpy(&result.storage_, address, result.length_);
  return result;
}

SocketAddress SocketAddress::parse(const std::string& address, std::uint16_t port, const std::string& interface) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (address.empty() || ::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    throw UsageError("'" + address + "' is not a numeric IPv4 or IPv6 address; say for example 10.0.0.1 or fd00::1");
  }
  auto result = from(found->ai_addr, found->ai_addrlen);
  ::freeaddrinfo(found);
  if (result.family() == AF_INET6 && !interface.empty()) {
    auto& ipv6 = reinterpret_cast<sockaddr_in6&>(result.storage_);
    if (IN6_IS_ADDR_LINKLOCAL(&ipv6.sin6_addr)) ipv6.sin6_scope_id = ::if_nametoindex(interface.c_str());
  }
  return result;
}

std::optional<SocketAddress> SocketAddress::local_of(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (::getsockname(fd, address, &length) != 0) return std::nullopt;
  return from(address, length);
}

std::optional<SocketAddress> SocketAddress::remote_of(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (::getpeername(fd, address, &length) != 0) return std::nullopt;
  return from(address, length);
}

std::uint16_t SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(storage_).sin_port);
  return family() == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6&>(storage_).sin6_port) : 0;
}

std::string SocketAddress::host() const {
  std::array<char, NI_MAXHOST> text{};
  if (::getnameinfo(data(), length_, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "unknown";
  return text.data();
}

std::string SocketAddress::text() const {
  if (family() == AF_UNIX) return "unix";
  const auto port_text = ":" + std::to_string(port());
  return family() == AF_INET6 ? "[" + host() + "]" + port_text : host() + port_text;
}

bool SocketAddress::same_host(const SocketAddress& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in&>(storage_).sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(other.storage_).sin_addr.s_addr;
  }
  return family() == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(other.storage_).sin6_addr, sizeof(in6_addr)) == 0;
}

namespace {

// Absent: it has none, or one of another family.
std::optional<SocketAddress> ip_address_of(const ifaddrs& entry) {
  if (entry.ifa_addr == nullptr) return std::nullopt;
  const int family = entry.ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return std::nullopt;
  return SocketAddress::from(entry.ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

}  // namespace

void check_nic(const NicBinding& nic) {
  const ErrorContext context{.nic = nic.interface};
  const auto wanted = [&] {
    try {
      return SocketAddress::parse(nic.address, 0, nic.interface);
    } catch (const UsageError& error) {
      throw NicError("NIC " + nic.interface + ": " + error.what(), context);
    }
  }();
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) {
    throw SystemError("cannot list the network interfaces: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::set<std::string> interfaces, addresses, holders;
  unsigned flags = 0;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    interfaces.insert(entry->ifa_name);
    const bool is_wanted_nic = entry->ifa_name == nic.interface;
    if (is_wanted_nic) flags |= entry->ifa_flags;
    const auto address = ip_address_of(*entry);
    if (address && is_wanted_nic) addresses.insert(address->host());
    if (address && address->same_host(wanted)) holders.insert(entry->ifa_name);
  }
  if (!interfaces.contains(nic.interface)) {
    throw NicError("there is no network interface '" + nic.interface + "' on this host; there are " +
                       or_none(interfaces) + "; choose one of these (a name may differ per host)",
                   context);
  }
  if ((flags & IFF_UP) == 0) {
    throw NicError("network interface '" + nic.interface + "' is down; bring it up (ip link set " + nic.interface +
                       " up) or choose another NIC",
                   context);
  }
  if ((flags & IFF_RUNNING) == 0 && !wait_for_carrier(nic.interface)) {
    throw NicError("network interface '" + nic.interface +
                       "' is up but has no carrier; check its cable and switch port or choose another NIC",
                   context);
  }
  const bool is_loopback = (flags & IFF_LOOPBACK) != 0 && nic.address.starts_with("127.");  // lo has all of 127.0.0.0/8
  if (!is_loopback && !holders.contains(nic.interface)) {
    throw NicError("network interface '" + nic.interface + "' does not have the address " + nic.address + "; it has " +
                       or_none(addresses) + (holders.empty() ? "" : "; the address is on " + joined(holders)) +
                       "; give an address of that interface",
                   context);
  }
}

std::string why_not_itself(const SocketAddress& address) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::string down;
  bool is_own = address.host().starts_with("127.") || address.host() == "::1";
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0 && (entry->ifa_flags & IFF_UP) == 0) down = entry->ifa_name;
    if (const auto own = ip_address_of(*entry)) is_own |= own->same_host(address);
  }
  if (!is_own || down.empty()) return "";
  return ", as the loopback device of this network namespace is down: ip link set " + down + " up";
}

bool bind_to_device(int fd, const std::string& interface) {
  return ::setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, interface.c_str(),
                      static_cast<socklen_t>(interface.size() + 1)) == 0;
}

void set_dscp(int fd, int dscp) {
  constexpr int ecn_bits = 2;
  const int field = dscp << ecn_bits;
  set_option(fd, IPPROTO_IP, IP_TOS, field);
  set_option(fd, IPPROTO_IPV6, IPV6_TCLASS, field);
}

BoundSocket listen_on_nic(const NicBinding& nic, bool bind_device,
                          const std::optional<std::pair<std::uint16_t, std::uint16_t>>& port_range) {
  const auto [first, last] = port_range.value_or(std::pair<std::uint16_t, std::uint16_t>{0, 0});
  const int port_count = last - first + 1;
  // Ranks that start together begin at different ports of the range.
  const int start = port_count > 1 ? static_cast<int>(std::random_device{}() % static_cast<unsigned>(port_count)) : 0;
  for (int i = 0; i < port_count; ++i) {
    const auto port = static_cast<std::uint16_t>(first + (start + i) % port_count);
    const auto address = SocketAddress::parse(nic.address, port, nic.interface);
    BoundSocket result{open_socket(address.family())};
    if (bind_device) result.device_bound = bind_to_device(result.fd.get(), nic.interface);
    if (::bind(result.fd.get(), address.data(), address.length()) == 0 && ::listen(result.fd.get(), SOMAXCONN) == 0) {
      return result;
    }
    if (errno != EADDRINUSE) throw_nic_error(nic, "cannot listen on " + address.text(), errno);
  }
  const auto ports =
      port_range ? "HOLMES_PORT_RANGE " + std::to_string(first) + "-" + std::to_string(last) : "any port";
  throw SystemError("no free port on " + nic.address + " (NIC " + nic.interface + ") in " + ports +
                        "; widen the range or stop other jobs",
                    {.nic = nic.interface, .system_errno = EADDRINUSE});
}

BoundSocket connect_from_nic(const NicBinding& nic, bool bind_device, const SocketAddress& remote,
                             const std::string& congestion, std::optional<int> dscp, int& system_errno) {
  const auto local = SocketAddress::parse(nic.address, 0, nic.interface);
  BoundSocket result{open_socket(local.family())};
  const int fd = result.fd.get();
  if (bind_device) result.device_bound = bind_to_device(fd, nic.interface);
  if (!congestion.empty()) set_congestion_control(fd, congestion);
  if (dscp) set_dscp(fd, *dscp);
  // The port is chosen at connect, so that it need be unique only together with the remote address.
  set_option(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  system_errno = 0;
  if (::bind(fd, local.data(), local.length()) != 0) throw_nic_error(nic, "cannot bind to " + nic.address, errno);
  if (::connect(fd, remote.data(), remote.length()) != 0 && errno != EINPROGRESS) {
    system_errno = errno;
    result.fd.reset();
  }
  return result;
}

UniqueFd listen_on_unix(const std::string& token) {
  auto fd = open_socket(AF_UNIX);
  const auto [address, length] = abstract_address(token);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    throw SystemError(
        "cannot listen on an abstract Unix socket: " + errno_text(errno) + "; set HOLMES_SHM=0 to use TCP",
        {.system_errno = errno});
  }
  return fd;
}

UniqueFd connect_to_unix(const std::string& token, int& system_errno) {
  auto fd = open_socket(AF_UNIX);
  const auto [address, length] = abstract_address(token);
  system_errno = 0;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    system_errno = errno;  // EAGAIN: the listener's queue is full
    fd.reset();
  }
  return fd;
}

UniqueFd accept_one(int listener) {
  UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
    const int error = errno;
    throw SystemError("cannot accept a connection: " + errno_text(error) + limit_text(error), {.system_errno = error});
  }
  return fd;  // every other error concerns the one connection that was to be accepted
}

void tune_socket(int fd, std::optional<std::chrono::milliseconds> unacknowledged) {
  constexpr int idle_s = 20, probes = 4;
  // With a limit of its own a connection ends at the first probe after it that has an unanswered one before: often
  // enough that several have to be lost, not one.
  const int interval_s = unacknowledged ? 2 : 10;
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, interval_s);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, probes);
  if (unacknowledged) {
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<unsigned>(unacknowledged->count()));
  }
}

bool set_congestion_control(int fd, const std::string& algorithm) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, algorithm.data(), static_cast<socklen_t>(algorithm.size())) == 0;
}

std::string congestion_control_of(int fd) {
  std::array<char, 16> name{};  // TCP_CA_NAME_MAX
  socklen_t length = name.size() - 1;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) == 0 ? name.data() : "";
}

bool heeds_loss(const std::string& algorithm) { return !algorithm.starts_with("bbr"); }

std::string default_congestion_control() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string algorithm;
  file >> algorithm;
  return algorithm;
}

std::optional<std::chrono::microseconds> shortest_round_trip(int fd) {
  const auto info = tcp_info_of(fd);
  if (!info || info->tcpi_min_rtt == 0 || info->tcpi_min_rtt == ~0U) return std::nullopt;
  return std::chrono::microseconds(info->tcpi_min_rtt);
}

namespace {

// How large a sending buffer may be: set by hand, and grown by itself.
std::pair<int, int> send_limits() {
  static const auto limits = [] {
    constexpr int wanted = 64 * 1024 * 1024;
    const auto probe = open_socket(AF_INET);
    int allowed = 0;
    socklen_t length = sizeof allowed;
    set_option(probe.get(), SOL_SOCKET, SO_SNDBUF, wanted);
    ::getsockopt(probe.get(), SOL_SOCKET, SO_SNDBUF, &allowed, &length);
    std::ifstream file("/proc/sys/net/ipv4/tcp_wmem");
    int least = 0, usual = 0, most = 0;
    file >> least >> usual >> most;
    return std::pair(allowed, most);
  }();
  return limits;
}

}  // namespace

void suit_far_path(int fd, bool is_algorithm_given) {
  if (!is_algorithm_given && !set_congestion_control(fd, "bbr"))
    set_congestion_control(fd, default_congestion_control());
  // What is set by hand does not grow by itself any more: only where it is more than what it would grow to.
  const auto [by_hand, by_itself] = send_limits();
  if (by_hand > by_itself) set_option(fd, SOL_SOCKET, SO_SNDBUF, by_hand / 2);  // the system doubles what is set
}

const std::string& unpaced_congestion_control() {
  static const std::string name = set_congestion_control(open_socket(AF_INET).get(), "cubic") ? "cubic" : "reno";
  return name;
}

bool has_bbr() {
  static const bool has = set_congestion_control(open_socket(AF_INET).get(), "bbr");
  return has;
}

bool is_bounded_by_buffer(std::chrono::microseconds round_trip) {
  constexpr double goal_bytes_per_s = 10e9 / 8;  // where it is reached, copies for more streams would cost more
  constexpr double payload_share = 0.7;
  const auto [by_hand, by_itself] = send_limits();
  return goal_bytes_per_s * std::chrono::duration<double>(round_trip).count() >
         payload_share * std::max(by_hand, by_itself);
}

bool is_buffer_full(int fd) {
  std::array<std::uint32_t, SK_MEMINFO_VARS> memory{};
  socklen_t length = sizeof memory;
  if (::getsockopt(fd, SOL_SOCKET, SO_MEMINFO, memory.data(), &length) != 0) return true;
  return memory[SK_MEMINFO_WMEM_QUEUED] > memory[SK_MEMINFO_SNDBUF] / 2;
}

std::optional<::tcp_info> tcp_info_of(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  return info;
}

std::optional<BbrLook> bbr_of(int fd) {
  constexpr std::uint32_t least_gain_of_start = 2 * 256;  // 739; later 320 at most
  tcp_bbr_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_CC_INFO, &info, &length) != 0 || length < sizeof info) return std::nullopt;
  return BbrLook{.is_starting = info.bbr_pacing_gain >= least_gain_of_start,
                 .bytes_per_s = std::uint64_t{info.bbr_bw_hi} << 32 | info.bbr_bw_lo};
}

bool is_unanswered(int fd) {
  const auto info = tcp_info_of(fd);
  return info && info->tcpi_unacked > 0 && info->tcpi_retransmits > 0;
}

int socket_error(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

}  // namespace holmes
