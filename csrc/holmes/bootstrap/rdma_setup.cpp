#include "holmes/bootstrap/rdma_setup.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/core/text.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/transport/rdma/rdma_channel.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// How long to look for the reason after a peer has gone away.
constexpr Duration told_why_grace = 2s;

constexpr int pairs_of_a_peer = 2;  // for collectives, for messages

using RdmaDevices = std::vector<std::shared_ptr<const RdmaDevice>>;

struct Connecting {
  PeerConnections* connections = nullptr;
  std::array<std::vector<std::unique_ptr<RdmaQueuePair>>, pairs_of_a_peer> pairs{};  // by purpose and lane
  std::vector<RdmaEndpoint> theirs{};                                                // the same
  std::array<RdmaChannel*, pairs_of_a_peer> channels{};
  char is_ready = 0;

  int fd() const { return connections->collective.front().fd.get(); }
};

class RdmaSetup {
public:
  RdmaSetup(const CommunicatorOptions& options, std::string ports, Clock::time_point deadline,
            const std::function<void()>& look_around)
      : options_(options), ports_(std::move(ports)), deadline_(deadline), look_around_(look_around) {}

  const std::string& ports() const { return ports_; }

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
        std::vector<pollfd> fds{{from.fd(), POLLIN, 0}};
        wait(from, fds, from.connections->collective.front().info);
      } else {
        throw_gone(from);
      }
    }
  }

  void prove(const Connecting& pair, RdmaChannel& channel) {
    while (const ConnectionInfo* const info = channel.look_for_proof()) {
      std::vector<pollfd> fds;
      channel.append_waits(fds);
      wait(pair, fds, *info);
    }
  }

private:
  // Until a descriptor is readable, or it is time to look around.
  void wait(const Connecting& from, std::vector<pollfd>& fds, const ConnectionInfo& info) {
    const auto now = Clock::now();
    if (now >= deadline_)
      throw UnreachableError("rank " + std::to_string(from.connections->peer) + " (host " + from.connections->host +
                                 ") did not answer over RDMA (" + ports_ + ": " + info.local_address + " -> " +
                                 info.remote_address + ") within " + seconds_text(options_.connect_timeout) +
                                 "; check that it still runs and that the two ports reach each other",
                             context(from));
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(deadline_ - now, look_around_interval));
    if (::poll(fds.data(), fds.size(), static_cast<int>(left.count())) > 0) return;
    look_around_();
    check_signals();
  }

  [[noreturn]] void throw_gone(const Connecting& from) {
    for (const auto end = Clock::now() + told_why_grace; Clock::now() < end;) look_around_();  // it may have told why
    throw UnreachableError("rank " + std::to_string(from.connections->peer) + " (host " + from.connections->host +
                               ") ended while RDMA over " + ports_ + " was set up; check that it still runs",
                           context(from));
  }

  ErrorContext context(const Connecting& from) const {
    return {.rank = label_of(options_, options_.rank),
            .peer = label_of(options_, from.connections->peer),
            .host = from.connections->host,
            .nic = ports_};
  }

  const CommunicatorOptions& options_;
  const std::string ports_;
  const Clock::time_point deadline_;
  const std::function<void()>& look_around_;
};

std::string ports_text(const RankInfo& record) {
  return joined(record.rdma_ports, ", ", [](const CarryingPort& port) { return port.name; });
}

}  // namespace

std::vector<std::string> rdma_ports_of(const CommunicatorOptions& options) {
  std::vector<std::string> ports;
  for (const std::string& port : options.rdma_ports) ports.push_back(with_port(port));
  if (!ports.empty()) return ports;
  for (const NicBinding& binding : options.nics)
    if (const auto nic = find_nic(binding.interface); nic && !nic->hca.empty()) ports.push_back(nic->port_name());
  return ports.size() == options.nics.size() ? ports : std::vector<std::string>{};
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
      const ErrorContext context{.peer = one.label, .host = one.host, .nic = ports_text(one)};
      if (one.rdma_ports.empty())
        throw NicError("transport rdma is asked for, but " + label(rank) +
                           " has no RDMA port for it; choose a NIC that has one (`holmes nics` lists them) or name the "
                           "port (rdma_ports), or use transport tcp",
                       context);
      if (two.rdma_ports.empty()) continue;
      if (one.rdma_ports.size() != two.rdma_ports.size())
        throw NicError(label(rank) + " uses " + ports_text(one) + " and " + label(other) + " " + ports_text(two) +
                           ", but each port of one rank talks to one of the other; give every rank as many (max_rails)",
                       context);
      for (std::size_t i = 0; i < one.rdma_ports.size(); ++i)
        if (one.rdma_ports[i].fabric != two.rdma_ports[i].fabric)
          throw NicError(label(rank) + " uses " + one.rdma_ports[i].name + " (" + one.rdma_ports[i].fabric + ") and " +
                             label(other) + " " + two.rdma_ports[i].name + " (" + two.rdma_ports[i].fabric +
                             "), which cannot talk; choose ports and GIDs of one kind (HOLMES_RDMA_GID_INDEX), or use "
                             "transport tcp",
                         context);
    }
  }
}

void connect_rdma(Mesh& mesh, const CommunicatorOptions& options, const RdmaDevices& devices,
                  Clock::time_point deadline, const std::function<void()>& look_around) {
  std::vector<Connecting> all;
  RdmaSetup setup(options, joined(devices, ", ", [](const auto& device) { return device->name(); }), deadline,
                  look_around);
  const auto context = make_rails_context(options, {});
  for (PeerConnections& connections : mesh.peers) {
    if (connections.peer < 0 || connections.uses_shared_memory()) continue;
    Connecting& one = all.emplace_back();
    one.connections = &connections;
    std::vector<RdmaEndpoint> own;
    for (auto& pairs : one.pairs) {
      const auto rings = std::make_shared<RdmaRings>(RdmaRings::bytes_for(options.size), devices.front()->name());
      for (const auto& device : devices) {
        pairs.push_back(std::make_unique<RdmaQueuePair>(device, rings));
        own.push_back(pairs.back()->endpoint());
      }
    }
    one.theirs.resize(own.size());
    setup.send(one, own.data(), own.size() * sizeof own[0]);
  }
  for (Connecting& one : all) {
    setup.receive(one, one.theirs.data(), one.theirs.size() * sizeof one.theirs[0]);
    auto theirs = one.theirs.begin();
    for (const auto& pairs : one.pairs)
      for (const auto& pair : pairs) pair->connect(*theirs++);
    const char ready = 1;
    setup.send(one, &ready, sizeof ready);
  }
  for (Connecting& one : all) {
    setup.receive(one, &one.is_ready, sizeof one.is_ready);
    PeerConnections& connections = *one.connections;
    const auto make = [&](int i, std::vector<Connection>& sockets) {
      auto channel =
          std::make_unique<RdmaChannel>(connections.peer, std::move(one.pairs[i]), std::exchange(sockets, {}), context);
      channel->start_proof();
      for (const int fd : channel->descriptors()) connections.rdma.descriptors.push_back(fd);
      one.channels[i] = channel.get();
      return channel;
    };
    connections.nic = setup.ports();
    connections.rdma.collective = make(0, connections.collective);
    connections.rdma.p2p = make(1, connections.p2p);
  }
  for (const Connecting& one : all)
    for (RdmaChannel* channel : one.channels) setup.prove(one, *channel);
}

}  // namespace holmes
