#include "holmes/bootstrap/rdma_setup.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

#include "holmes/bootstrap/silent_paths.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/core/text.hpp"
#include "holmes/discover/host.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/transport/rdma/rdma_channel.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

// How long to look for the reason after a peer has gone away.
constexpr Duration told_why_grace = 2s;
// How long a path may take to answer where TCP would do as well.
constexpr Duration longest_optional_proof = 5s;
// A path that does not answer for so long is not tried again for a while.
constexpr Duration telling_silence = 1s;
// Of what a rank says that it cannot.
constexpr std::uint32_t max_told_bytes = 2048;

constexpr std::size_t pairs_of_a_peer = 2;  // for collectives, for messages

struct Connecting {
  PeerConnections* connections = nullptr;
  std::array<std::vector<std::unique_ptr<RdmaQueuePair>>, pairs_of_a_peer> pairs{};  // by purpose and lane
  std::vector<RdmaEndpoint> theirs{};                                                // the same
  std::array<std::unique_ptr<RdmaChannel>, pairs_of_a_peer> channels{};
  std::string told{};  // what the peer cannot; empty: it can

  bool needs_rdma() const { return !connections->uses_shared_memory(); }
  int fd() const { return connections->control.front().fd.get(); }
};

// In three steps, after each of which every rank tells all others whether it could: so all go on, or none does.
class RdmaSetup {
public:
  RdmaSetup(const CommunicatorOptions& options, const RdmaDevices& devices, Clock::time_point deadline,
            const std::function<void()>& look_around)
      : options_(options),
        devices_(devices),
        ports_(joined(devices, ", ", [](const auto& device) { return device->name(); })),
        deadline_(deadline),
        look_around_(look_around) {}

  void add(PeerConnections& connections) {
    Connecting& one = all_.emplace_back();
    one.connections = &connections;
    if (one.needs_rdma()) one.theirs.resize(pairs_of_a_peer * devices_.size());
  }

  // Nothing where RDMA is used from now on; else why not.
  std::optional<std::string> run() {
    for (const auto& step : {&RdmaSetup::make_pairs, &RdmaSetup::connect_pairs, &RdmaSetup::prove}) {
      const std::string own = attempt(step);
      const bool has_endpoints = step == &RdmaSetup::make_pairs;
      for (const Connecting& one : all_) tell(one, own, has_endpoints);
      for (Connecting& one : all_) hear(one, has_endpoints);
      if (auto refusal = first_told(own)) {
        give_up();
        return refusal;
      }
    }
    for (Connecting& one : all_)
      if (one.needs_rdma()) hand_over(one);
    return std::nullopt;
  }

private:
  // --- the steps ---
  void make_pairs() {
    for (Connecting& one : all_) {
      for (auto& pairs : one.pairs) {
        if (!one.needs_rdma()) continue;
        const auto rings = std::make_shared<RdmaRings>(RdmaRings::bytes_for(static_cast<int>(all_.size()) + 1),
                                                       devices_.front()->name());
        for (const auto& device : devices_) pairs.push_back(std::make_unique<RdmaQueuePair>(device, rings));
      }
    }
  }

  void connect_pairs() {
    for (Connecting& one : all_) {
      auto theirs = one.theirs.begin();
      for (const auto& pairs : one.pairs) {
        for (const auto& pair : pairs) {
          if (is_optional()) check_not_silent(one, pair->path_to(*theirs));
          pair->connect(*theirs++);
        }
      }
    }
  }

  void check_not_silent(const Connecting& to, const std::string& path) const {
    const auto since = silent_since(path);
    if (!since) return;
    throw UnreachableError("rank " + std::to_string(label(to)) + " (host " + to.connections->host +
                               ") did not answer over RDMA (" + path + ") when this process tried that " +
                               seconds_text(*since) + " ago; it tries again after ten minutes, or with transport rdma",
                           context(to));
  }

  void prove() {
    const auto context = make_rails_context(options_, {});
    for (Connecting& one : all_) {
      if (!one.needs_rdma()) continue;
      for (std::size_t i = 0; i < pairs_of_a_peer; ++i) {
        auto& sockets = i == 0 ? one.connections->collective : one.connections->p2p;
        one.channels[i] = std::make_unique<RdmaChannel>(one.connections->peer, std::move(one.pairs[i]),
                                                        std::exchange(sockets, {}), context);
        one.channels[i]->start_proof();
      }
    }
    const auto now = Clock::now();
    const auto until =
        is_optional() ? now + std::min<Duration>(longest_optional_proof, (deadline_ - now) / 2) : deadline_;
    try {
      for (const Connecting& one : all_)
        for (const auto& channel : one.channels)
          if (channel) prove(one, *channel, until, until - now);
    } catch (const UnreachableError&) {
      if (!is_alarmed_) remember_silence(Clock::now() >= until && until - now >= telling_silence);
      throw;
    }
  }

  // `is_over`: the time for an answer.
  void remember_silence(bool is_over) const {
    for (const Connecting& one : all_) {
      for (const auto& channel : one.channels) {
        if (!channel) continue;
        try {
          channel->look_for_proof();
        } catch (const UnreachableError&) {  // it knows why
        }
        for (const std::string& path : channel->silent_paths(is_over)) remember_silent(path);
      }
    }
  }

  void prove(const Connecting& one, RdmaChannel& channel, Clock::time_point until, Duration given) {
    while (const ConnectionInfo* const info = channel.look_for_proof()) {
      std::vector<pollfd> fds;
      channel.append_waits(fds);
      if (!wait(fds, until))
        throw UnreachableError("rank " + std::to_string(label(one)) + " (host " + one.connections->host +
                                   ") did not answer over RDMA (" + ports_ + ": " + info->local_address + " -> " +
                                   info->remote_address + ") within " +
                                   seconds_text(is_optional() ? given : options_.connect_timeout) +
                                   "; check that it still runs and that the two ports reach each other",
                               context(one));
    }
  }

  // --- what the ranks tell each other ---
  bool is_optional() const { return options_.transport != Transport::rdma; }

  // What is wrong with a step, where RDMA may be left; else it throws, as where another rank has ended the set-up.
  std::string attempt(void (RdmaSetup::*step)()) {
    try {
      (this->*step)();
      return {};
    } catch (const HolmesError& error) {
      if (!is_optional() || is_alarmed_) throw;
      return std::string(error.what()).substr(0, max_told_bytes);
    }
  }

  void tell(const Connecting& to, const std::string& own, bool has_endpoints) {
    const auto length = static_cast<std::uint32_t>(own.size());
    send(to, &length, sizeof length);
    if (!own.empty()) return send(to, own.data(), own.size());
    if (!has_endpoints) return;
    for (const auto& pairs : to.pairs) {
      for (const auto& pair : pairs) {
        const RdmaEndpoint endpoint = pair->endpoint();
        send(to, &endpoint, sizeof endpoint);
      }
    }
  }

  void hear(Connecting& from, bool has_endpoints) {
    std::uint32_t length = 0;
    receive(from, &length, sizeof length);
    if (length > max_told_bytes)
      throw ProtocolError("rank " + std::to_string(label(from)) + " (host " + from.connections->host +
                              ") says of its RDMA ports what makes no sense; all processes must run the same version",
                          context(from));
    from.told.resize(length);
    receive(from, from.told.data(), length);
    if (length == 0 && has_endpoints) receive(from, from.theirs.data(), from.theirs.size() * sizeof from.theirs[0]);
  }

  // Of the first rank that cannot: the same on all.
  std::optional<std::string> first_told(const std::string& own) const {
    std::optional<std::string> first;
    int rank = options_.size;
    const auto look_at = [&](int other, const std::string& told, const std::string& host) {
      if (told.empty() || other > rank) return;
      rank = other;
      first = "rank " + std::to_string(label_of(options_, other)) + " (host " + host + "): " + told;
    };
    look_at(options_.rank, own, host_name());
    for (const Connecting& one : all_) look_at(one.connections->peer, one.told, one.connections->host);
    return first;
  }

  void hand_over(Connecting& one) {
    PeerConnections& connections = *one.connections;
    connections.nic = ports_;
    for (const auto& channel : one.channels)
      for (const std::string& path : channel->paths()) forget_silent(path);
    for (const auto& channel : one.channels)
      for (const int fd : channel->descriptors()) connections.rdma.descriptors.push_back(fd);
    connections.rdma.collective = std::move(one.channels[0]);
    connections.rdma.p2p = std::move(one.channels[1]);
  }

  void give_up() {
    for (Connecting& one : all_) {
      if (one.channels[0]) one.connections->collective = one.channels[0]->take_sockets();
      if (one.channels[1]) one.connections->p2p = one.channels[1]->take_sockets();
    }
    all_.clear();
  }

  // --- bytes ---
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
        if (!wait(fds, deadline_))
          throw UnreachableError("rank " + std::to_string(label(from)) + " (host " + from.connections->host +
                                     ") did not say within " + seconds_text(options_.connect_timeout) +
                                     " whether RDMA over " + ports_ + " can be used; check that it still runs",
                                 context(from));
      } else {
        throw_gone(from);
      }
    }
  }

  // Until a descriptor is readable, or it is time to look around. False: it is `until`.
  bool wait(std::vector<pollfd>& fds, Clock::time_point until) {
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now >= look_around_at_) {
      look_around();
      check_signals();
      look_around_at_ = now + look_around_interval;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(std::min(until, look_around_at_) - now);
    ::poll(fds.data(), fds.size(), static_cast<int>(left.count()));
    return true;
  }

  void look_around() {
    try {
      look_around_();
    } catch (const HolmesError&) {
      is_alarmed_ = true;
      throw;
    }
  }

  [[noreturn]] void throw_gone(const Connecting& from) {
    for (const auto end = Clock::now() + told_why_grace; Clock::now() < end;) look_around();  // it may have told why
    throw UnreachableError("rank " + std::to_string(label(from)) + " (host " + from.connections->host +
                               ") ended while RDMA over " + ports_ + " was set up; check that it still runs",
                           context(from));
  }

  int label(const Connecting& one) const { return label_of(options_, one.connections->peer); }

  ErrorContext context(const Connecting& from) const {
    return {
        .rank = label_of(options_, options_.rank), .peer = label(from), .host = from.connections->host, .nic = ports_};
  }

  const CommunicatorOptions& options_;
  const RdmaDevices& devices_;
  const std::string ports_;
  const Clock::time_point deadline_;
  const std::function<void()>& look_around_;
  Clock::time_point look_around_at_ = Clock::now() + look_around_interval;
  bool is_alarmed_ = false;
  std::vector<Connecting> all_;
};

std::string ports_text(const RankInfo& record) {
  return joined(record.rdma_ports, ", ", [](const CarryingPort& port) { return port.name; });
}

}  // namespace

std::vector<std::string> rdma_ports_of(const CommunicatorOptions& options) {
  std::vector<std::string> ports;
  for (const std::string& port : options.rdma_ports) ports.push_back(with_port(port));
  if (!ports.empty()) return ports;
  const auto& nics = options.clusters.empty() || options.cluster_nics.empty() ? options.nics : options.cluster_nics;
  for (const NicBinding& binding : nics)
    if (const auto nic = find_nic(binding.interface); nic && !nic->hca.empty()) ports.push_back(nic->port_name());
  return ports.size() == nics.size() ? ports : std::vector<std::string>{};
}

std::string rdma_objection(const CommunicatorOptions& options, const Env& env) {
  const TlsMode tls = options.tls.value_or(tls_mode_from_name(env.tls));
  if (tls != TlsMode::off) return "asks for tls='" + name(tls) + "', and RDMA has no encryption";
  if (options.dscp) return "asks for dscp=" + std::to_string(*options.dscp) + ", which only TCP has";
  if (env.transport && *env.transport != "auto" && *env.transport != "rdma")
    return "has HOLMES_TRANSPORT=" + *env.transport;
  return {};
}

RdmaDevices open_rdma(const CommunicatorOptions& options, const Env& env, RankInfo& own) {
  const bool is_optional = options.transport == Transport::automatic;
  if (options.transport != Transport::rdma && (!is_optional || options.rdma_ports.empty())) return {};
  const auto& clusters = options.clusters;
  if (!clusters.empty() && std::ranges::count(clusters, clusters[static_cast<std::size_t>(options.rank)]) == 1)
    return {};  // between clusters it is TCP
  RdmaDevices devices;
  try {
    if (is_optional) own.no_rdma = rdma_objection(options, env);
    if (!own.no_rdma.empty()) return {};
    const auto ports = rdma_ports_of(options);
    if (ports.size() > max_lanes)
      throw UsageError("transport rdma uses " + std::to_string(max_lanes) + " ports of a rank at most, but " +
                       std::to_string(ports.size()) + " are named; name fewer (max_rails)");
    for (const std::string& port : ports) devices.push_back(std::make_shared<RdmaDevice>(port, env));
  } catch (const HolmesError& error) {
    if (!is_optional) throw;
    own.no_rdma = error.what();
    return {};
  }
  for (const auto& device : devices) own.rdma_ports.push_back({device->name(), device->fabric()});
  return devices;
}

namespace {

// Between clusters it is TCP.
bool need_rdma(const RankInfo& one, const RankInfo& two) {
  return &one != &two && one.same_cluster(two) && !one.can_share_memory(two);
}

// Why the ports of two ranks that need RDMA cannot carry what is between them.
std::optional<NicError> refusal_of(const RankInfo& one, const RankInfo& two) {
  const auto text_of = [](const RankInfo& record) {
    return "rank " + std::to_string(record.label) + " (host " + record.host + ")";
  };
  const ErrorContext context{.peer = one.label, .host = one.host, .nic = ports_text(one)};
  if (one.rdma_ports.empty() && one.transport != Transport::rdma)
    return NicError(text_of(one) + (one.no_rdma.empty() ? " has no RDMA port" : ": " + one.no_rdma), context);
  if (one.rdma_ports.empty())
    return NicError("transport rdma is asked for, but " + text_of(one) +
                        " has no RDMA port for it; choose a NIC that has one (`holmes nics` lists them) or name the "
                        "port (rdma_ports), or use transport tcp",
                    context);
  if (two.rdma_ports.empty()) return std::nullopt;
  if (one.rdma_ports.size() != two.rdma_ports.size())
    return NicError(text_of(one) + " uses " + ports_text(one) + " and " + text_of(two) + " " + ports_text(two) +
                        ", but each port of one rank talks to one of the other; give every rank as many (max_rails)",
                    context);
  for (std::size_t i = 0; i < one.rdma_ports.size(); ++i)
    if (one.rdma_ports[i].fabric != two.rdma_ports[i].fabric)
      return NicError(text_of(one) + " uses " + one.rdma_ports[i].name + " (" + one.rdma_ports[i].fabric + ") and " +
                          text_of(two) + " " + two.rdma_ports[i].name + " (" + two.rdma_ports[i].fabric +
                          "), which cannot talk; choose ports and GIDs of one kind (HOLMES_RDMA_GID_INDEX), or use "
                          "transport tcp",
                      context);
  return std::nullopt;
}

}  // namespace

void check_rdma(const std::vector<RankInfo>& records) {
  for (const RankInfo& one : records)
    for (const RankInfo& two : records)
      if (need_rdma(one, two))
        if (const auto refusal = refusal_of(one, two)) throw NicError(*refusal);
}

std::optional<std::string> connect_rdma(Mesh& mesh, const std::vector<RankInfo>& records,
                                        const CommunicatorOptions& options, const RdmaDevices& devices,
                                        Clock::time_point deadline, const std::function<void()>& look_around) {
  std::vector<RankInfo> members;  // of this rank's cluster, who decide for themselves
  const auto& own = records[static_cast<std::size_t>(options.rank)];
  std::ranges::copy_if(records, std::back_inserter(members),
                       [&](const RankInfo& one) { return one.same_cluster(own); });
  const auto brings_some = [](const RankInfo& one) { return !one.rdma_ports.empty() || !one.no_rdma.empty(); };
  const auto has_need = [&](const RankInfo& one) {
    return std::ranges::any_of(members, [&](const RankInfo& two) { return need_rdma(one, two); });
  };
  if (std::ranges::none_of(members, brings_some) || std::ranges::none_of(members, has_need)) return std::nullopt;
  try {
    check_rdma(members);
  } catch (const NicError& refusal) {
    return refusal.what();
  }
  RdmaSetup setup(options, devices, deadline, look_around);
  for (PeerConnections& connections : mesh.peers)
    if (connections.peer >= 0 && own.same_cluster(records[static_cast<std::size_t>(connections.peer)]))
      setup.add(connections);
  return setup.run();
}

}  // namespace holmes
