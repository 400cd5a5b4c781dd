#include "holmes/bootstrap/rdma_setup.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/transport/rdma/rdma_channel.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// How long to look for the reason after a peer has gone away.
constexpr Duration told_why_grace = 2s;

constexpr int pairs_of_a_peer = 2;  // for collectives, for messages

struct Connecting {
  PeerConnections* connections = nullptr;
  std::array<std::unique_ptr<RdmaQueuePair>, pairs_of_a_peer> pairs;
  std::array<RdmaEndpoint, pairs_of_a_peer> theirs{};
  std::array<RdmaChannel*, pairs_of_a_peer> channels{};
  char is_ready = 0;

  int fd() const { return connections->collective.front().fd.get(); }
};

class RdmaSetup {
public:
  RdmaSetup(const CommunicatorOptions& options, const std::string& port, Clock::time_point deadline,
            const std::function<void()>& look_around)
      : options_(options), port_(port), deadline_(deadline), look_around_(look_around) {}

  void send(const Connecting& to, const void* bytes, std::size_t count) {
    const ssize_t sent = ::send(to.fd(), bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);  // so few fit a fresh socket
    if (sent != static_cast<ssize_t>(count)) throw_gone(to);
  }

  void receive(const Connecting& from, void* into, std::size_t count) {
    auto* to = static_cast<std::byte*>(into);
    while (count > 0) {
      const ssize_t got = ::recv(from.fd(), to, count, MSG_DONTWAIT);
      if (got > 0) {
        to += got;
        count -= static_cast<std::size_t>(got);
      } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        wait(from, from.fd(), from.connections->collective.front().info);
      } else {
        throw_gone(from);
      }
    }
  }

  void prove(const Connecting& pair, RdmaChannel& channel, const ConnectionInfo& info) {
    while (!channel.is_proven()) wait(pair, channel.fd(), info);
  }

private:
  // Until the descriptor is readable, or it is time to look around.
  void wait(const Connecting& from, int fd, const ConnectionInfo& info) {
    const auto now = Clock::now();
    if (now >= deadline_)
      throw UnreachableError("rank " + std::to_string(from.connections->peer) + " (host " + from.connections->host +
                                 ") did not answer over RDMA (" + port_ + ": " + info.local_address + " -> " +
                                 info.remote_address + ") within " + seconds_text(options_.connect_timeout) +
                                 "; check that it still runs and that the two ports reach each other",
                             context(from));
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline_ - now, look_around_interval));
    pollfd one{fd, POLLIN, 0};
    if (::poll(&one, 1, static_cast<int>(left.count())) > 0) return;
    look_around_();
    check_signals();
  }

  [[noreturn]] void throw_gone(const Connecting& from) {
    for (const auto end = Clock::now() + told_why_grace; Clock::now() < end;) look_around_();  // it may have told why
    throw UnreachableError("rank " + std::to_string(from.connections->peer) + " (host " + from.connections->host +
                               ") ended while RDMA over " + port_ + " was set up; check that it still runs",
                           context(from));
  }

  ErrorContext context(const Connecting& from) const {
    return {.rank = label_of(options_, options_.rank),
            .peer = label_of(options_, from.connections->peer),
            .host = from.connections->host,
            .nic = port_};
  }

  const CommunicatorOptions& options_;
  const std::string port_;
  const Clock::time_point deadline_;
  const std::function<void()>& look_around_;
};

}  // namespace

std::string rdma_port_of(const CommunicatorOptions& options) {
  if (!options.rdma_ports.empty()) return with_port(options.rdma_ports.front());
  if (options.nics.empty()) return "";
  const auto nic = find_nic(options.nics.front().interface);
  return nic ? nic->port_name() : "";
}

void check_rdma(const std::vector<RankInfo>& records) {
  const auto label = [&](std::size_t rank) {
    return "rank " + std::to_string(records[rank].label) + " (host " + records[rank].host + ")";
  };
  for (std::size_t rank = 0; rank < records.size(); ++rank) {
    for (std::size_t other = 0; other < records.size(); ++other) {
      const RankInfo& one = records[rank];
      const RankInfo& two = records[other];
      if (rank == other || one.can_share_memory(two)) continue;
      const ErrorContext context{.peer = one.label, .host = one.host, .nic = one.rdma_port};
      if (one.rdma_port.empty())
        throw NicError("transport rdma is asked for, but " + label(rank) +
                           " has no RDMA port for it; choose a NIC that has one (`holmes nics` lists them) or name the "
                           "port (rdma_ports), or use transport tcp",
                       context);
      if (!two.rdma_port.empty() && one.rdma_fabric != two.rdma_fabric)
        throw NicError(label(rank) + " uses " + one.rdma_port + " (" + one.rdma_fabric + ") and " + label(other) + " " +
                           two.rdma_port + " (" + two.rdma_fabric +
                           "), which cannot talk; choose ports and GIDs of one kind (HOLMES_RDMA_GID_INDEX), or use "
                           "transport tcp",
                       context);
    }
  }
}

void connect_rdma(Mesh& mesh, const CommunicatorOptions& options, const std::shared_ptr<const RdmaDevice>& device,
                  Clock::time_point deadline, const std::function<void()>& look_around) {
  std::vector<Connecting> all;
  RdmaSetup setup(options, device ? device->name() : "", deadline, look_around);
  const std::size_t ring_bytes = RdmaQueuePair::ring_bytes_for(options.size);
  for (PeerConnections& connections : mesh.peers) {
    if (connections.peer < 0 || connections.uses_shared_memory()) continue;
    Connecting& one = all.emplace_back();
    one.connections = &connections;
    std::array<RdmaEndpoint, pairs_of_a_peer> own{};
    for (int i = 0; i < pairs_of_a_peer; ++i) {
      one.pairs[i] = std::make_unique<RdmaQueuePair>(device, ring_bytes);
      own[i] = one.pairs[i]->endpoint();
    }
    setup.send(one, own.data(), sizeof own);
  }
  for (Connecting& one : all) {
    setup.receive(one, one.theirs.data(), sizeof one.theirs);
    for (int i = 0; i < pairs_of_a_peer; ++i) one.pairs[i]->connect(one.theirs[i]);
    const char ready = 1;
    setup.send(one, &ready, sizeof ready);
  }
  for (Connecting& one : all) {
    setup.receive(one, &one.is_ready, sizeof one.is_ready);
    PeerConnections& connections = *one.connections;
    const auto make = [&](int i, Connection& socket) {
      auto channel = std::make_unique<RdmaChannel>(connections.peer, std::move(one.pairs[i]), std::move(socket));
      channel->start_proof();
      for (const int fd : channel->descriptors()) connections.rdma.descriptors.push_back(fd);
      one.channels[i] = channel.get();
      return channel;
    };
    connections.nic = device->name();
    connections.rdma.collective = make(0, connections.collective.front());
    connections.rdma.p2p = make(1, connections.p2p.front());
    connections.collective.clear();
    connections.p2p.clear();
  }
  for (const Connecting& one : all) {
    for (RdmaChannel* channel : one.channels) {
      std::vector<ConnectionInfo> info;
      channel->append_info(info);
      setup.prove(one, *channel, info.front());
    }
  }
}

}  // namespace holmes
