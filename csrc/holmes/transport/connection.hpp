// Connection: one connected socket to a peer, encrypted or not: where bytes leave and enter the process.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <memory>

#include "holmes/core/connection_info.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/record/link_use.hpp"
#include "holmes/tls/tls_stream.hpp"
#include "holmes/transport/path_pacer.hpp"
#include "holmes/transport/path_watch.hpp"

namespace holmes {

// Of a TCP socket that lives as long.
std::unique_ptr<LinkUse> use_of(int fd, std::shared_ptr<Link> link);

// What a connection is used for. Values are part of the handshake.
enum class Purpose : std::uint8_t { control = 0, collective = 1, p2p = 2 };

// One connected, authenticated, non-blocking TCP socket (TCP_NODELAY set), bound to one rail.
struct Connection {
  UniqueFd fd{};
  bool is_reserve = false;  // nothing is sent on it as long as those before it suffice
  int rail = 0;             // index into CommunicatorOptions::nics and, behind them, cluster_nics
  ConnectionInfo info;      // peer, host, transport, purpose, interface, both addresses, device_bound, encryption
  std::unique_ptr<TlsStream> tls{};    // null: as it is
  std::unique_ptr<PathPacer> pacer{};  // null: of a group without a priority
  std::unique_ptr<PathWatch> watch{};  // null: the peer is near
  std::unique_ptr<LinkUse> use{};      // null: it is no TCP, or a control connection

  // As sendmsg and recvmsg, without blocking or SIGPIPE. After a partial send the next one must begin with the bytes
  // that follow, the same ones as were offered.
  ssize_t send(const msghdr& message) const {
    if (!pacer) return send_now(message);
    const auto now = Clock::now();
    pacer->before_send(now);
    if (pacer->pauses()) {
      errno = EAGAIN;
      return -1;
    }
    const ssize_t sent = send_now(message);
    pacer->after_send(now);
    return sent;
  }
  ssize_t recv(msghdr& message) const {
    if (tls) return tls->recv(message);
    const iovec& first = *message.msg_iov;
    return message.msg_iovlen == 1 ? ::recv(fd.get(), first.iov_base, first.iov_len, MSG_DONTWAIT)
                                   : ::recvmsg(fd.get(), &message, MSG_DONTWAIT);
  }
  // It would block though the socket has room.
  bool pauses() const { return pacer && pacer->pauses(); }
  // A small message, whole or not at all where that can be. Not on a socket that uses `send`.
  ssize_t post(const msghdr& message) const {
    return tls ? tls->post(message) : ::sendmsg(fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  // `info` with what the system and `watch` know by now. Safe from any thread.
  ConnectionInfo current_info() const;
  // Whether bytes may be here that no poll tells of: recv until EAGAIN first.
  bool may_hold_input() const { return tls && tls->may_hold_input(); }

private:
  ssize_t send_now(const msghdr& message) const {
    if (tls) return tls->send(message);
    const iovec& first = *message.msg_iov;
    return message.msg_iovlen == 1 ? ::send(fd.get(), first.iov_base, first.iov_len, MSG_DONTWAIT | MSG_NOSIGNAL)
                                   : ::sendmsg(fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
};

}  // namespace holmes
