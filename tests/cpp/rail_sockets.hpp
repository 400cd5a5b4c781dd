// Loopback TCP connections as a mesh would hand them to a RailsChannel.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <utility>
#include <vector>

#include "check.hpp"
#include "holmes/bootstrap/mesh.hpp"

namespace holmes::test {

inline Connection mesh_socket(UniqueFd fd, int rail) {
  ::fcntl(fd.get(), F_SETFL, ::fcntl(fd.get(), F_GETFL) | O_NONBLOCK);
  Connection socket;
  socket.fd = std::move(fd);
  socket.rail = rail;
  socket.info.peer = 1;
  socket.info.interface = "lo";
  return socket;
}

// The two ends of a connection.
inline std::pair<UniqueFd, UniqueFd> tcp_pair() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(::bind(listener.get(), generic, length) == 0 && ::listen(listener.get(), 1) == 0);
  CHECK(::getsockname(listener.get(), generic, &length) == 0);
  UniqueFd left(::socket(AF_INET, SOCK_STREAM, 0));
  CHECK(::connect(left.get(), generic, length) == 0);
  UniqueFd right(::accept(listener.get(), nullptr, nullptr));
  CHECK(left && right);
  return {std::move(left), std::move(right)};
}

struct RailSockets {
  std::vector<Connection> left, right;
};

inline RailSockets rail_sockets(int rails) {
  RailSockets sockets;
  for (int rail = 0; rail < rails; ++rail) {
    auto [left, right] = tcp_pair();
    sockets.left.push_back(mesh_socket(std::move(left), rail));
    sockets.right.push_back(mesh_socket(std::move(right), rail));
  }
  return sockets;
}

// Ends a connection as a reset on the wire would. What its own end has received is gone; what was acknowledged by the
// other end can be read there.
inline void reset_connection(int fd) {
  sockaddr nobody{};
  nobody.sa_family = AF_UNSPEC;
  CHECK(::connect(fd, &nobody, sizeof nobody) == 0);
}

}  // namespace holmes::test
