#include "holmes/bootstrap/mesh_builder.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/core/log.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t max_strangers = 64;  // beyond the connections that are expected
constexpr int max_accepts = 64;            // per turn of the loop
constexpr auto control_unacknowledged = 30s;
// A large group has many pairs, and each of its ranks as many descriptors.
constexpr int most_far_streams_of_a_rank = 256;
// To a rank: where one's buffer is the limit, and where lost packets are as well.
constexpr int usual_far_streams = 4;
constexpr int lossy_far_streams = max_far_streams;
constexpr int most_lossy_far_streams_of_a_rank = 64;

const char* name(Purpose purpose) {
  return purpose == Purpose::control ? "control" : purpose == Purpose::collective ? "collective" : "p2p";
}

UniqueFd make_shared_memory(std::size_t bytes) {
  UniqueFd fd(::memfd_create("holmes", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw SystemError("cannot make a shared memory segment of " + std::to_string(bytes) + " bytes: " +
                          errno_text(errno) + limit_text(errno) + "; or set HOLMES_SHM=0 to use TCP inside a host",
                      {.system_errno = errno});
  }
  return fd;
}

bool is_closed_by_peer(int fd) {
  char byte = 0;
  const ssize_t got = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

constexpr Duration first_retry_delay = 20ms;
constexpr Duration max_retry_delay = 500ms;
constexpr Duration permanent_failure_after = 1s;  // an error that is not expected to go away has to last this long
constexpr int max_refusals = 4;

bool is_permanent(int system_errno) {
  return system_errno == ENETUNREACH || system_errno == EHOSTUNREACH || system_errno == EINVAL ||
         system_errno == EACCES || system_errno == EPERM;
}

// Of the right size, and sealed so that the peer cannot shrink it under our feet.
bool is_good_shared_memory(int fd, std::size_t bytes) {
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &status) == 0 &&
         status.st_size == static_cast<off_t>(bytes);
}

}  // namespace

MeshBuilder::MeshBuilder(const CommunicatorOptions& options, const Env& env, std::vector<NicBinding> nics,
                         std::size_t shared_memory_bytes)
    : options_(options), env_(env), nics_(std::move(nics)), shared_memory_bytes_(shared_memory_bytes) {}

void MeshBuilder::listen(RankInfo& record) {
  for (int rail = 0; rail < static_cast<int>(nics_.size()) && options_.transport != Transport::shm; ++rail) {
    const auto& nic = nics_[static_cast<std::size_t>(rail)];
    RailAddress& published = record.rails.emplace_back(RailAddress{nic.interface, nic.address});
    auto socket = listen_on_nic(nic, can_bind_device(nic), env_.port_range);
    published.port = published.local_port = SocketAddress::local_of(socket.fd.get()).value().port();
    const bool shuts_out_local = socket.device_bound && !is_loopback(nic.address);
    suit_listener(socket.fd.get());
    listeners_.push_back({std::move(socket), rail});
    if (shuts_out_local) {
      auto local = listen_on_nic(nic, false, env_.port_range);
      suit_listener(local.fd.get());
      published.local_port = SocketAddress::local_of(local.fd.get()).value().port();
      listeners_.push_back({std::move(local), rail});
    }
  }
  if (!record.unix_token.empty()) listeners_.push_back({{listen_on_unix(record.unix_token)}, 0, true});
}

// What it accepts has it too.
void MeshBuilder::suit_listener(int fd) const {
  const bool is_set = set_congestion_control(fd, env_.tcp_congestion.value_or(unpaced_congestion_control()));
  if (!is_set && env_.tcp_congestion)
    throw UsageError("HOLMES_TCP_CONGESTION='" + *env_.tcp_congestion +
                     "' cannot be used here: it must be a name in net.ipv4.tcp_allowed_congestion_control (" +
                     errno_text(errno) + "); say for example cubic or unset it");
  if (const auto dscp = dscp_of(options_)) set_dscp(fd, *dscp);
}

bool MeshBuilder::is_same_machine(int peer) const {
  const auto& records = *records_;
  return records[static_cast<std::size_t>(peer)].same_machine(records[static_cast<std::size_t>(options_.rank)]);
}

std::string MeshBuilder::congestion_control(int peer) const {
  if (env_.tcp_congestion) return *env_.tcp_congestion;
  const auto& records = *records_;
  const bool same_kernel =
      records[static_cast<std::size_t>(peer)].same_kernel(records[static_cast<std::size_t>(options_.rank)]);
  return same_kernel ? unpaced_congestion_control() : "";
}

bool MeshBuilder::shares_memory(int peer) const {
  const auto& records = *records_;
  return records[static_cast<std::size_t>(peer)].can_share_memory(records[static_cast<std::size_t>(options_.rank)]);
}

RailRange MeshBuilder::rails_to(int peer) const {
  const auto& records = *records_;
  return records[static_cast<std::size_t>(options_.rank)].rails_to(records[static_cast<std::size_t>(peer)]);
}

bool MeshBuilder::encrypts(int peer) const {
  const auto& own = (*records_)[static_cast<std::size_t>(options_.rank)];
  if (shares_memory(peer) || own.tls == TlsMode::off) return false;
  return own.tls == TlsMode::all || !own.same_cluster((*records_)[static_cast<std::size_t>(peer)]);
}

std::string MeshBuilder::describe(int rank) const {
  return "rank " + std::to_string(label(rank)) + " (host " + (*records_)[static_cast<std::size_t>(rank)].host + ")";
}

Connection& MeshBuilder::slot(int peer, Purpose purpose, int rail, int stream) {
  if (stream > 0) return more_streams_.at({peer, purpose, rail})[static_cast<std::size_t>(stream) - 1];
  auto& connections = mesh_.peers[static_cast<std::size_t>(peer)];
  auto& sockets = purpose == Purpose::control      ? connections.control
                  : purpose == Purpose::collective ? connections.collective
                                                   : connections.p2p;
  return sockets[shares_memory(peer) ? 0 : static_cast<std::size_t>(rail) - rails_to(peer).first];
}

void MeshBuilder::prepare_slots() {
  mesh_.peers.resize(static_cast<std::size_t>(options_.size));
  for (int peer = 0; peer < options_.size; ++peer) {
    mesh_.hosts.push_back((*records_)[static_cast<std::size_t>(peer)].host);
    if (peer == options_.rank) continue;
    auto& connections = mesh_.peers[static_cast<std::size_t>(peer)];
    connections.peer = peer;
    connections.host = mesh_.hosts.back();
    const bool shm = shares_memory(peer);
    const auto rails = rails_to(peer);
    connections.nic = shm ? "shm" : nics_[rails.first].interface;
    connections.control.resize(shm ? 1 : rails.size());
    if (!shm) connections.collective.resize(rails.size()), connections.p2p.resize(rails.size());
    missing_ += shm ? 1 : 3 * static_cast<int>(rails.size());
    if (peer > options_.rank) continue;
    if (shm) attempts_.push_back({.peer = peer, .over_unix = true});
    for (int rail = static_cast<int>(rails.first); !shm && rail < static_cast<int>(rails.end); ++rail) {
      attempts_.push_back({.peer = peer, .purpose = Purpose::control, .rail = rail});
      attempts_.push_back({.peer = peer, .purpose = Purpose::collective, .rail = rail});
      attempts_.push_back({.peer = peer, .purpose = Purpose::p2p, .rail = rail});
    }
  }
}

int MeshBuilder::choose_streams(const Attempt& attempt) const {
  // Several rails are several connections already, and who asked for them has chosen.
  const auto& records = *records_;
  const bool uses_rdma =
      options_.transport == Transport::rdma &&
      records[static_cast<std::size_t>(options_.rank)].same_cluster(records[static_cast<std::size_t>(attempt.peer)]);
  if (attempt.over_unix || attempt.purpose == Purpose::control || uses_rdma || rails_to(attempt.peer).size() > 1)
    return 1;
  // Nearly all that are near are known by this, without asking the system.
  if (Clock::now() - attempt.started_at < far_round_trip) return 1;
  const auto round_trip = shortest_round_trip(attempt.socket.fd.get());
  if (!round_trip || *round_trip < far_round_trip) return 1;
  const bool has_loss_bound = env_.tcp_congestion ? heeds_loss(*env_.tcp_congestion) : !has_bbr();
  if (!has_loss_bound && !is_bounded_by_buffer(*round_trip)) return 1;
  const int usual = std::clamp(most_far_streams_of_a_rank / options_.size, 1, usual_far_streams);
  const int lossy = std::clamp(most_lossy_far_streams_of_a_rank / options_.size, usual, lossy_far_streams);
  const int most = has_loss_bound ? lossy : usual;
  return env_.far_streams ? std::clamp(most_far_streams_of_a_rank / options_.size, 1, *env_.far_streams) : most;
}

void MeshBuilder::expect_streams(int peer, Purpose purpose, int rail, int streams) {
  const auto more = static_cast<std::size_t>(streams) - 1;
  const auto [place, is_new] = more_streams_.try_emplace({peer, purpose, rail});
  if (!is_new) return;
  place->second.resize(more);
  missing_ += static_cast<int>(more);
}

bool MeshBuilder::has_all_streams(int peer, int rail) const {
  const auto stands = [](const Connection& connection) { return static_cast<bool>(connection.fd); };
  return std::ranges::all_of(more_streams_, [&](const auto& entry) {
    const auto [other, purpose, its_rail] = entry.first;
    return other != peer || its_rail != rail || std::ranges::all_of(entry.second, stands);
  });
}

void MeshBuilder::append_streams() {
  for (auto& [place, streams] : more_streams_) {
    const auto [peer, purpose, rail] = place;
    auto& connections = mesh_.peers[static_cast<std::size_t>(peer)];
    auto& sockets = purpose == Purpose::collective ? connections.collective : connections.p2p;
    std::ranges::move(streams, std::back_inserter(sockets));
  }
}

Mesh MeshBuilder::connect(const std::vector<RankInfo>& records, const std::string& secret, Clock::time_point deadline,
                          const std::function<void()>& look_around) {
  records_ = &records;
  secret_ = secret;
  prepare_slots();
  look_around_at_ = Clock::now() + look_around_interval;
  SignalTimer signals;
  while (missing_ > 0) {
    const auto now = Clock::now();
    if (now >= deadline) throw_incomplete(options_.connect_timeout);
    if (now >= look_around_at_) {
      try {
        look_around();
      } catch (const UnreachableError& heard) {  // what all ranks miss shows who is cut off: Rendezvous::collect
        if (!heard.context().peer) throw;        // the store is lost
        throw_incomplete(options_.connect_timeout - (deadline - now));
      }
      look_around_at_ = Clock::now() + look_around_interval;
    }
    poll_once(*earliest({deadline, signals.due()}));
    if (!signals.is_due()) continue;
    check_signals();
    signals = {};
  }
  append_streams();
  return std::move(mesh_);
}

void MeshBuilder::poll_once(Clock::time_point deadline) {
  auto wake_at = std::min(deadline, look_around_at_);
  std::vector<pollfd> fds;
  for (auto& attempt : attempts_) {
    if (!attempt.socket.fd && Clock::now() >= attempt.retry_at) start(attempt);
    wake_at = std::min(wake_at, attempt.socket.fd ? attempt.deadline : attempt.retry_at);
    // A negative descriptor is skipped by poll: indices stay aligned.
    const short events = attempt.tls            ? attempt.tls->events()
                         : attempt.is_connected ? attempt.handshake->events()
                                                : short{POLLOUT};
    fds.push_back({attempt.socket.fd.get(), events, 0});
  }
  for (const auto& stranger : strangers_) {
    fds.push_back({stranger.fd.get(), stranger.tls ? stranger.tls->events() : stranger.handshake.events(), 0});
    wake_at = std::min(wake_at, stranger.deadline);
  }
  for (const auto& listener : listeners_) fds.push_back({listener.socket.fd.get(), POLLIN, 0});

  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::max(wake_at - Clock::now(), Duration::zero()));
  const int ready = ::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
  if (ready < 0 && errno != EINTR) {
    throw SystemError("cannot wait for connections: " + errno_text(errno), {.system_errno = errno});
  }
  std::size_t next = 0;
  for (auto& attempt : attempts_) {
    const short revents = fds[next++].revents;
    if (!attempt.socket.fd) continue;
    if (revents != 0) {
      advance(attempt);
    } else if (Clock::now() >= attempt.deadline) {
      retry(attempt, attempt.is_connected ? "it accepts connections but does not answer" : "no answer", ETIMEDOUT);
    }
  }
  std::erase_if(attempts_, [](const Attempt& attempt) { return attempt.is_done; });
  std::ranges::move(more_attempts_, std::back_inserter(attempts_));
  more_attempts_.clear();
  for (auto& stranger : strangers_) {
    if (fds[next++].revents != 0) {
      advance(stranger);
    } else if (Clock::now() >= stranger.deadline) {
      drop(stranger, "it kept silent for " + seconds_text(handshake_timeout));
    }
  }
  std::erase_if(strangers_, [](const Stranger& stranger) { return stranger.is_done; });
  for (const auto& listener : listeners_) {
    if (fds[next++].revents != 0) accept_all(listener);
  }
}

void MeshBuilder::accept_all(const Listener& listener) {
  const auto limit = max_strangers + static_cast<std::size_t>(missing_);
  for (int i = 0; i < max_accepts; ++i) {
    auto fd = accept_one(listener.socket.fd.get());
    if (!fd) return;
    if (strangers_.size() >= limit) {  // the oldest had the longest chance
      drop(strangers_.front(), "too many connections at once");
      strangers_.erase(strangers_.begin());
    }
    const auto remote = SocketAddress::remote_of(fd.get());
    auto check = [this, &listener](const Hello& hello) { return check_hello(hello, listener); };
    strangers_.push_back({std::move(fd), &listener,
                          Handshake::listening(static_cast<std::uint32_t>(options_.rank), secret_, std::move(check)),
                          nullptr, Clock::now() + handshake_timeout, remote ? remote->text() : "unknown address"});
  }
}

std::string MeshBuilder::check_hello(const Hello& hello, const Listener& listener) const {
  if (hello.group != group_hash(options_.name)) return "it belongs to another communicator";
  if (hello.rank >= static_cast<std::uint32_t>(options_.size) ||
      hello.rank <= static_cast<std::uint32_t>(options_.rank)) {
    return "it says it is rank " + std::to_string(hello.rank) + ", which does not connect here";
  }
  if (listener.is_unix != shares_memory(static_cast<int>(hello.rank))) return "it uses the wrong transport";
  const bool is_rail = listener.is_unix || rails_to(static_cast<int>(hello.rank)).contains(hello.rail);
  if (hello.rail != listener.rail || !is_rail || hello.purpose > Purpose::p2p ||
      (listener.is_unix && hello.purpose != Purpose::control)) {
    return "it asks for a connection that does not exist";
  }
  const int most = hello.purpose == Purpose::control ? 1 : max_far_streams;
  const auto known = more_streams_.find({static_cast<int>(hello.rank), hello.purpose, hello.rail});
  const bool is_expected = known == more_streams_.end() || known->second.size() + 1 == hello.streams;
  if (hello.streams > most || hello.stream >= hello.streams || !is_expected)
    return "it asks for a stream that does not exist";
  return "";
}

void MeshBuilder::advance(Stranger& stranger) {
  auto step = stranger.tls ? Handshake::Step::done : stranger.handshake.step(stranger.fd.get());
  if (step == Handshake::Step::verified) {
    const auto& hello = stranger.handshake.peer();
    const int peer = static_cast<int>(hello.rank);
    // What was unknown when its hello came may be known by now.
    const std::string refusal = check_hello(hello, *stranger.listener);
    if (!refusal.empty()) return drop(stranger, refusal);
    expect_streams(peer, hello.purpose, hello.rail, hello.streams);
    const auto& socket = slot(peer, hello.purpose, hello.rail, hello.stream);
    if (socket.fd && !is_closed_by_peer(socket.fd.get())) {
      return drop(stranger, "this connection of rank " + std::to_string(peer) + " stands already");
    }
    auto& connections = mesh_.peers[static_cast<std::size_t>(peer)];
    if (stranger.listener->is_unix) {
      connections.shared_memory = make_shared_memory(shared_memory_bytes_);
      connections.shared_memory_bytes = shared_memory_bytes_;
      stranger.handshake.confirm(connections.shared_memory.get());
    } else {
      stranger.handshake.confirm(std::nullopt);
    }
    step = stranger.handshake.step(stranger.fd.get());
  }
  if (step == Handshake::Step::failed) drop(stranger, stranger.handshake.failure());
  if (step == Handshake::Step::done) {
    const auto& hello = stranger.handshake.peer();
    const int peer = static_cast<int>(hello.rank);
    if (encrypts(peer)) {
      if (!stranger.tls)
        stranger.tls = std::make_unique<TlsStream>(stranger.fd.get(), false, stranger.handshake.connection_key());
      const auto tls_step = stranger.tls->handshake();
      if (tls_step == TlsStream::Step::waiting) return;
      if (tls_step == TlsStream::Step::failed) {
        if (!stranger.tls->is_broken()) throw_no_tls(peer, hello.rail, stranger.tls->failure());
        return drop(stranger, stranger.tls->failure());
      }
    }
    fill(peer, hello.purpose, hello.rail, hello.stream,
         {.fd = std::move(stranger.fd), .info = {}, .tls = std::move(stranger.tls)}, stranger.listener->is_unix,
         stranger.listener->socket.device_bound);
    stranger.is_done = true;
  }
}

void MeshBuilder::drop(Stranger& stranger, const std::string& reason) {
  log_of_stranger(label(options_.rank),
                  "communicator '" + options_.name + "' dropped a connection from " + stranger.address + ": " + reason);
  stranger.fd.reset();
  stranger.is_done = true;
}

// Where a path between two ranks ends, in words.
std::string MeshBuilder::place_of(int rank, int seen_from) const {
  const auto there = static_cast<std::size_t>(rank), here = static_cast<std::size_t>(seen_from);
  const auto& names = options_.cluster_names;
  if (!names.empty() && names[here] != names[there]) return "cluster " + names[there];
  if (names.empty() && !(*records_)[here].same_cluster((*records_)[there]))
    return "cluster " + (*records_)[there].cluster;
  return "host " + mesh_.hosts[there];
}

void MeshBuilder::fill(int peer, Purpose purpose, int rail, int stream, Connection connected, bool over_unix,
                       bool device_bound) {
  auto& socket = slot(peer, purpose, rail, stream);
  if (!socket.fd) --missing_;  // else it replaces one that the peer gave up
  socket.watch.reset();        // they ask for a socket that is about to close
  socket.use.reset();
  socket = std::move(connected);
  const auto& nic = nics_[static_cast<std::size_t>(rail)];
  const auto local = SocketAddress::local_of(socket.fd.get()), remote = SocketAddress::remote_of(socket.fd.get());
  socket.rail = rail;
  socket.is_reserve = stream > 0;
  socket.info = {.peer = peer,
                 .host = mesh_.hosts[static_cast<std::size_t>(peer)],
                 .transport = over_unix ? "shm" : "tcp",
                 .purpose = name(purpose),
                 .interface = over_unix ? "" : nic.interface,
                 .local_address = local ? local->text() : "unknown",
                 .remote_address = remote ? remote->text() : "unknown",
                 .device_bound = device_bound,
                 .encryption = socket.tls ? socket.tls->description() : ""};
  if (!over_unix) {
    using Limit = std::optional<std::chrono::milliseconds>;
    // Between sockets of one address nothing can be cut; a kernel that is busy with very many of them answers late.
    const bool may_be_cut = !local || !remote || !local->same_host(*remote);
    tune_socket(socket.fd.get(),
                purpose == Purpose::control && may_be_cut ? Limit(control_unacknowledged) : std::nullopt);
    // What was accepted has its listener's, which suits ranks of this kernel.
    const std::string congestion = congestion_control(peer);
    if (congestion.empty()) set_congestion_control(socket.fd.get(), default_congestion_control());
    const auto round_trip = shortest_round_trip(socket.fd.get());
    const bool is_far = round_trip && *round_trip >= far_round_trip;
    const auto& own = (*records_)[static_cast<std::size_t>(options_.rank)];
    const bool is_other = !own.same_cluster((*records_)[static_cast<std::size_t>(peer)]);
    socket.info.is_between = options_.between_clusters.value_or(own.cluster.empty() ? is_far : is_other);
    const std::string to = place_of(peer, options_.rank);
    if (is_far) {
      suit_far_path(socket.fd.get(), env_.tcp_congestion.has_value());
      if (purpose != Purpose::control)
        socket.watch = std::make_unique<PathWatch>(Path::of(nic.interface, to), options_.rank, socket.fd.get());
    }
    // Those inside a cluster are not looked at: idle communicators wake nobody.
    if (purpose != Purpose::control && socket.info.is_between)
      socket.use = use_of(socket.fd.get(), link_between(nic.interface, place_of(options_.rank, peer), to));
    if (options_.priority && purpose != Purpose::control)
      socket.pacer = std::make_unique<PathPacer>(socket.fd.get(), Precedence{*options_.priority, options_.turn},
                                                 nic.interface, socket.info.is_between);
  }
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

bool can_bind_device(const NicBinding& nic) { return nic.interface != "lo" || is_loopback(nic.address); }

void MeshBuilder::start(Attempt& attempt) {
  const auto& peer = (*records_)[static_cast<std::size_t>(attempt.peer)];
  attempt.started_at = Clock::now();
  int system_errno = 0;
  if (attempt.over_unix) {
    attempt.socket = {connect_to_unix(peer.unix_token, system_errno)};
  } else {
    const auto& nic = nics_[static_cast<std::size_t>(attempt.rail)];
    const auto& rail = peer.rails[static_cast<std::size_t>(attempt.rail)];
    // Between addresses of one machine packets travel by lo, whatever the NIC.
    const bool stays_here = is_same_machine(attempt.peer) && !is_loopback(nic.address);
    const auto remote = SocketAddress::parse(rail.address, stays_here ? rail.local_port : rail.port, nic.interface);
    attempt.socket = connect_from_nic(nic, !stays_here && can_bind_device(nic), remote,
                                      congestion_control(attempt.peer), dscp_of(options_), system_errno);
  }
  if (!attempt.socket.fd) return retry(attempt, errno_text(system_errno), system_errno);
  attempt.tls.reset();
  attempt.is_connected = false;
  attempt.deadline = attempt.started_at + handshake_timeout;
}

// The first connection of a rail tells how far the peer is, hence how many there will be; the others follow at once.
void MeshBuilder::greet(Attempt& attempt) {
  if (attempt.streams == 0) {
    attempt.streams = choose_streams(attempt);
    expect_streams(attempt.peer, attempt.purpose, attempt.rail, attempt.streams);
    for (int stream = 1; stream < attempt.streams; ++stream)
      more_attempts_.push_back({.peer = attempt.peer,
                                .purpose = attempt.purpose,
                                .rail = attempt.rail,
                                .stream = stream,
                                .streams = attempt.streams});
  }
  Hello hello;
  hello.purpose = attempt.purpose;
  hello.streams = static_cast<std::uint8_t>(attempt.streams);
  hello.stream = static_cast<std::uint8_t>(attempt.stream);
  hello.rail = static_cast<std::uint8_t>(attempt.rail);
  hello.rank = static_cast<std::uint32_t>(options_.rank);
  hello.group = group_hash(options_.name);
  attempt.handshake =
      Handshake::connecting(hello, static_cast<std::uint32_t>(attempt.peer), secret_, attempt.over_unix);
  attempt.is_connected = true;
}

void MeshBuilder::advance(Attempt& attempt) {
  if (!attempt.is_connected) {
    if (const int error = socket_error(attempt.socket.fd.get())) return retry(attempt, errno_text(error), error);
    greet(attempt);
  }
  const auto step = attempt.tls ? Handshake::Step::done : attempt.handshake->step(attempt.socket.fd.get());
  if (step == Handshake::Step::failed) {
    if (attempt.handshake->proof_refused() || attempt.handshake->other_version()) ++attempt.refusals;
    return retry(attempt, attempt.handshake->failure());
  }
  // From here on the peer decides how long it takes: if we left now, it might count us in.
  if (attempt.handshake->awaits_proof()) attempt.deadline = Clock::time_point::max();
  if (step != Handshake::Step::done) return;
  auto& connections = mesh_.peers[static_cast<std::size_t>(attempt.peer)];
  if (attempt.over_unix) {
    connections.shared_memory = attempt.handshake->take_descriptor();
    connections.shared_memory_bytes = shared_memory_bytes_;
    if (!is_good_shared_memory(connections.shared_memory.get(), shared_memory_bytes_)) {
      throw ProtocolError(describe(attempt.peer) + " passed no sealed shared memory of " +
                              std::to_string(shared_memory_bytes_) +
                              " bytes; install the same version of Holmes everywhere or set HOLMES_SHM=0",
                          {.rank = label(options_.rank), .peer = label(attempt.peer), .host = connections.host});
    }
  }
  if (encrypts(attempt.peer)) {
    if (!attempt.tls)
      attempt.tls = std::make_unique<TlsStream>(attempt.socket.fd.get(), true, attempt.handshake->connection_key());
    const auto tls_step = attempt.tls->handshake();
    if (tls_step == TlsStream::Step::waiting) return;
    if (tls_step == TlsStream::Step::failed) {
      if (!attempt.tls->is_broken()) throw_no_tls(attempt.peer, attempt.rail, attempt.tls->failure());
      return retry(attempt, "TLS: " + attempt.tls->failure());
    }
  }
  fill(attempt.peer, attempt.purpose, attempt.rail, attempt.stream,
       {.fd = std::move(attempt.socket.fd), .info = {}, .tls = std::move(attempt.tls)}, attempt.over_unix,
       attempt.socket.device_bound);
  attempt.is_done = true;
}

void MeshBuilder::retry(Attempt& attempt, const std::string& failure, int system_errno) {
  const auto now = Clock::now();
  if (log_enabled(LogLevel::debug)) {
    log(LogLevel::debug, label(options_.rank), "connecting to " + describe(attempt.peer) + " failed: " + failure);
  }
  attempt.last_failure = failure;
  attempt.last_errno = system_errno;
  if (!attempt.first_failure) attempt.first_failure = now;
  const bool has_lasted = now - *attempt.first_failure >= permanent_failure_after;
  if (has_lasted && (is_permanent(system_errno) || attempt.refusals >= max_refusals)) give_up(attempt);
  attempt.retry_delay = std::clamp(attempt.retry_delay * 3 / 2, first_retry_delay, max_retry_delay);
  attempt.retry_at = now + attempt.retry_delay;
  attempt.tls.reset();
  attempt.socket = {};
  attempt.is_connected = false;
  // The peer may have failed; perhaps it told why.
  if (system_errno != EAGAIN) look_around_at_ = std::min(look_around_at_, now + look_around_soon);
}

void MeshBuilder::give_up(const Attempt& attempt) const {
  const auto& peer = (*records_)[static_cast<std::size_t>(attempt.peer)];
  const auto own = describe(options_.rank);
  ErrorContext context{.rank = label(options_.rank), .peer = label(attempt.peer), .host = peer.host};
  std::string path = "a Unix socket", why;
  if (!attempt.over_unix) {
    const auto& nic = nics_[static_cast<std::size_t>(attempt.rail)];
    const auto& rail = peer.rails[static_cast<std::size_t>(attempt.rail)];
    const auto address = SocketAddress::parse(rail.address, rail.port, nic.interface);
    context.nic = nic.interface;
    path = "NIC " + nic.interface + ": " + nic.address + " -> " + address.text();
    why = why_not_itself(address);
  }
  if (attempt.refusals > 0 && attempt.handshake && attempt.handshake->other_version()) {
    throw ProtocolError(describe(attempt.peer) + " and " + own + " cannot talk: " + attempt.last_failure +
                            "; install the same version of Holmes on every host (over " + path + ")",
                        context);
  }
  if (attempt.refusals >= max_refusals) {
    throw ProtocolError(describe(attempt.peer) + " refused the proof of " + own + " (over " + path +
                            "): their secrets differ, or the store showed them different records; give every rank the "
                            "same HOLMES_SECRET or HOLMES_SECRET_FILE and use a store that only this job can write",
                        context);
  }
  if (attempt.last_errno != 0) context.system_errno = attempt.last_errno;
  throw UnreachableError(
      describe(attempt.peer) + " cannot be reached from " + own + " over " + path + ": " + attempt.last_failure + why +
          "; check that this NIC has a route to that address and no firewall is in the way, or choose a "
          "NIC that all ranks of the communicator share",
      context);
}

void MeshBuilder::throw_no_tls(int peer, int rail, const std::string& failure) const {
  const auto& nic = nics_[static_cast<std::size_t>(rail)];
  throw ProtocolError(describe(peer) + " proved the secret, but TLS with it over NIC " + nic.interface +
                          " fails: " + failure +
                          "; give every rank the same tls (HOLMES_TLS), and check that nothing between the hosts "
                          "changes what they send",
                      {.rank = label(options_.rank),
                       .peer = label(peer),
                       .host = mesh_.hosts[static_cast<std::size_t>(peer)],
                       .nic = nic.interface});
}

void MeshBuilder::throw_incomplete(Duration waited) const {
  const auto within = " within " + seconds_text(waited);
  // An own attempt knows more than a connection that did not come; a failed one more than one under way.
  const Attempt* best = nullptr;
  for (const auto& attempt : attempts_) {
    if (best == nullptr || (best->last_failure.empty() && !attempt.last_failure.empty())) best = &attempt;
  }
  if (best != nullptr) {
    auto attempt_text = best->last_failure.empty() ? "no answer" : best->last_failure;
    Attempt copy{.peer = best->peer, .purpose = best->purpose, .rail = best->rail, .over_unix = best->over_unix};
    copy.last_failure = attempt_text + within;
    copy.last_errno = best->last_failure.empty() ? ETIMEDOUT : best->last_errno;
    give_up(copy);
  }
  for (int peer = options_.rank + 1; peer < options_.size; ++peer) {
    const auto& connections = mesh_.peers[static_cast<std::size_t>(peer)];
    const bool shm = shares_memory(peer);
    const auto rails = shm ? RailRange{0, 1} : rails_to(peer);
    for (std::size_t rail = rails.first; rail < rails.end; ++rail) {
      const auto i = rail - rails.first;
      const bool stands = connections.control[i].fd &&
                          (shm || (connections.collective[i].fd && connections.p2p[i].fd)) &&
                          has_all_streams(peer, static_cast<int>(rail));
      if (stands) continue;
      const auto& record = (*records_)[static_cast<std::size_t>(peer)];
      const auto& nic = nics_[rail];
      throw UnreachableError(
          describe(peer) + " did not connect to " + describe(options_.rank) + " over " +
              (shm ? "a Unix socket"
                   : "NIC " + nic.interface + ": " + record.rails[rail].address + " -> " + nic.address) +
              within +
              "; check that it still runs, that this NIC has a route to that address and no firewall is in the way, or "
              "choose a NIC that all ranks of the communicator share",
          {.rank = label(options_.rank), .peer = label(peer), .host = record.host, .nic = shm ? "" : nic.interface});
    }
  }
  throw TimeoutError("the mesh of communicator '" + options_.name + "' is incomplete", {.rank = label(options_.rank)});
}

}  // namespace holmes
