// ControlConnection: the small connection of a pair that tells of failures and of what an uplink carries, and wakes
// sleepers. It is never blocked by data. With rails there is one over each: every frame goes over all, so that no lost
// rail silences it.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holmes/bootstrap/mesh.hpp"
#include "holmes/core/error.hpp"
#include "holmes/group/whole_progress.hpp"
#include "holmes/transport/uplink.hpp"

namespace holmes {

struct Probe {
  std::uint64_t number = 1;              // of those of its sender, in order
  std::optional<WholeQuestion> whole{};  // of a wide group
};

// What a rank answers to a probe.
struct ProbeReply {
  std::uint64_t entered = 0;      // how many collectives it has entered
  std::optional<int> unanswered;  // a peer whose system acknowledges nothing of what this rank sends again
  std::string nic{};              // that goes over
  std::uint64_t number = 0;       // of the probe
  WholeState whole{};             // of a wide group
};

class ControlConnection {
public:
  ControlConnection(int peer, std::string host, std::string nic, std::vector<Connection> sockets)
      : peer_(peer), host_(std::move(host)), nic_(std::move(nic)) {
    for (Connection& socket : sockets) lines_.push_back({std::move(socket)});
  }

  // Non-blocking, from any thread. A full socket is fine: the peer has been told already, or no longer listens.
  void send_doorbell() noexcept;
  void send_abort(const Failure& failure) noexcept;
  void send_bye() noexcept;

  // The peer answers if somebody drives its communicator just now.
  void send_probe(const Probe& probe) noexcept;
  void send_probe_reply(const ProbeReply& reply) noexcept;
  void send_turn(const Turn& turn) noexcept;
  void send_carried(const Carried& carried) noexcept;
  // The peer's since the last call.
  std::vector<Turn> take_turns() { return std::exchange(turns_, {}); }
  std::vector<Carried> take_carried() { return std::exchange(carried_, {}); }
  // The last one that the peer sent since the last call.
  std::optional<Probe> take_probe() { return std::exchange(probe_, std::nullopt); }
  // Its answer since the last question.
  const std::optional<ProbeReply>& probe_reply() const { return probe_reply_; }

  // Reads what is there. Returns the failure the peer reported, if any. After it `is_closed` tells whether the peer is
  // gone: it closed a connection in order (its process ended), or all connections failed.
  std::optional<Failure> drain();
  bool is_closed() const { return closed_; }
  // Where no connection ended in order: the errno that the last one failed with, else 0.
  int lost_errno() const { return ended_in_order_ ? 0 : lost_errno_; }
  // It is gone because nothing comes through any more (the socket's TCP_USER_TIMEOUT and keepalive say so): what its
  // process wrote elsewhere does not either.
  bool is_cut() const;
  // The peer said it destroyed its communicator before it closed.
  bool said_bye() const { return bye_; }

  // Makes `epoll_fd`, open as long as `drain` is called, tell `number` (data.u32) when there is something to drain.
  void watch_with(int epoll_fd, std::uint32_t number);
  int peer() const { return peer_; }
  const std::string& host() const { return host_; }
  const std::string& nic() const { return nic_; }
  void append_info(std::vector<ConnectionInfo>& infos) const;
  // "rank 3 (host b1) on NIC roce0".
  std::string describe() const { return describe_peer(peer_, host_, nic_); }

private:
  struct Line {
    Connection socket;
    std::string received{};
    bool is_lost = false;
  };
  void send_frame(std::uint32_t type, std::initializer_list<std::string_view> payload) noexcept;
  std::optional<Failure> drain(Line& line);
  void unwatch(const Line& line) const;
  std::optional<Failure> parse(std::string& received);
  void take_probe(std::string_view payload);
  void take_probe_reply(std::string_view payload);
  void take_turn(std::string_view payload);
  void take_carried(std::string_view payload);

  int peer_;
  std::string host_;
  std::string nic_;
  std::vector<Line> lines_;
  int epoll_fd_ = -1;
  bool closed_ = false;
  bool ended_in_order_ = false;
  int lost_errno_ = 0;
  bool bye_ = false;
  std::optional<Probe> probe_;
  std::uint64_t last_probe_ = 0;  // its number; over another rail it comes again
  std::optional<ProbeReply> probe_reply_;
  std::vector<Turn> turns_;
  std::vector<Carried> carried_;
};

}  // namespace holmes
