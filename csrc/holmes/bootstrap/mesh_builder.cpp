#include "holmes/bootstrap/mesh_builder.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/log.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr Duration look_around_interval = 1s;
constexpr std::size_t max_strangers = 64;  // beyond the connections that are expected
constexpr int max_accepts = 64;            // per turn of the loop
constexpr int max_drop_warnings = 20;
constexpr auto control_unacknowledged = 30s;

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

// Between ranks of one kernel no wire limits the rate, and a pacing algorithm (bbr) costs up to half of it. It must be
// set before the connection stands: a socket that was paced once stays paced.
constexpr const char* unpaced = "reno";

}  // namespace

MeshBuilder::MeshBuilder(const CommunicatorOptions& options, const Env& env, std::vector<NicBinding> nics,
                         std::size_t shared_memory_bytes)
    : options_(options), env_(env), nics_(std::move(nics)), shared_memory_bytes_(shared_memory_bytes) {}

void MeshBuilder::listen(RankRecord& record) {
  for (int rail = 0; rail < static_cast<int>(nics_.size()) && options_.transport != Transport::shm; ++rail) {
    const auto& nic = nics_[static_cast<std::size_t>(rail)];
    RailRecord& published = record.rails.emplace_back(RailRecord{nic.interface, nic.address});
    auto socket = listen_on_nic(nic, can_bind_device(nic), env_.port_range);
    published.port = published.local_port = SocketAddress::local_of(socket.fd.get()).value().port();
    const bool shuts_out_local = socket.device_bound && !is_loopback(nic.address);
    set_congestion_control(socket.fd.get(), env_.tcp_congestion.value_or(unpaced));
    listeners_.push_back({std::move(socket), rail});
    if (shuts_out_local) {
      auto local = listen_on_nic(nic, false, env_.port_range);
      set_congestion_control(local.fd.get(), env_.tcp_congestion.value_or(unpaced));
      published.local_port = SocketAddress::local_of(local.fd.get()).value().port();
      listeners_.push_back({std::move(local), rail});
    }
  }
  if (!record.unix_token.empty()) listeners_.push_back({{listen_on_unix(record.unix_token)}, 0, true});
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
  return same_kernel ? unpaced : "";
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

std::string MeshBuilder::describe(int peer) const {
  return "rank " + std::to_string(peer) + " (host " + (*records_)[static_cast<std::size_t>(peer)].host + ")";
}

Connection& MeshBuilder::slot(int peer, Purpose purpose, int rail) {
  auto& link = mesh_.links[static_cast<std::size_t>(peer)];
  auto& sockets = purpose == Purpose::control      ? link.control
                  : purpose == Purpose::collective ? link.collective
                                                   : link.p2p;
  return sockets[shares_memory(peer) ? 0 : static_cast<std::size_t>(rail) - rails_to(peer).first];
}

void MeshBuilder::prepare_slots() {
  mesh_.links.resize(static_cast<std::size_t>(options_.size));
  for (int peer = 0; peer < options_.size; ++peer) {
    mesh_.hosts.push_back((*records_)[static_cast<std::size_t>(peer)].host);
    if (peer == options_.rank) continue;
    auto& link = mesh_.links[static_cast<std::size_t>(peer)];
    link.peer = peer;
    link.host = mesh_.hosts.back();
    const bool shm = shares_memory(peer);
    const auto rails = rails_to(peer);
    link.nic = shm ? "shm" : nics_[rails.first].interface;
    link.control.resize(shm ? 1 : rails.size());
    if (!shm) link.collective.resize(rails.size()), link.p2p.resize(rails.size());
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

Mesh MeshBuilder::connect(const std::vector<RankRecord>& records, const std::string& secret, Clock::time_point deadline,
                          const std::function<void()>& look_around) {
  records_ = &records;
  secret_ = secret;
  prepare_slots();
  look_around_at_ = Clock::now() + look_around_interval;
  while (missing_ > 0) {
    const auto now = Clock::now();
    if (now >= deadline) throw_incomplete();
    if (now >= look_around_at_) {
      look_around();
      look_around_at_ = Clock::now() + look_around_interval;
    }
    poll_once(deadline);
  }
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
  return "";
}

void MeshBuilder::advance(Stranger& stranger) {
  auto step = stranger.tls ? Handshake::Step::done : stranger.handshake.step(stranger.fd.get());
  if (step == Handshake::Step::verified) {
    const auto& hello = stranger.handshake.peer();
    const int peer = static_cast<int>(hello.rank);
    const auto& socket = slot(peer, hello.purpose, hello.rail);
    if (socket.fd && !is_closed_by_peer(socket.fd.get())) {
      return drop(stranger, "this connection of rank " + std::to_string(peer) + " stands already");
    }
    auto& link = mesh_.links[static_cast<std::size_t>(peer)];
    if (stranger.listener->is_unix) {
      link.shared_memory = make_shared_memory(shared_memory_bytes_);
      link.shared_memory_bytes = shared_memory_bytes_;
      stranger.handshake.confirm(link.shared_memory.get());
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
    fill(peer, hello.purpose, hello.rail, {.fd = std::move(stranger.fd), .info = {}, .tls = std::move(stranger.tls)},
         stranger.listener->is_unix, stranger.listener->socket.device_bound);
    stranger.is_done = true;
  }
}

void MeshBuilder::drop(Stranger& stranger, const std::string& reason) {
  // A flood of strangers must not become a flood of lines.
  const auto level = drops_++ < max_drop_warnings ? LogLevel::warn : LogLevel::debug;
  log(level, options_.rank,
      "communicator '" + options_.name + "' dropped a connection from " + stranger.address + ": " + reason +
          (drops_ == max_drop_warnings ? "; further ones are logged at level debug" : ""));
  stranger.fd.reset();
  stranger.is_done = true;
}

void MeshBuilder::fill(int peer, Purpose purpose, int rail, Connection connected, bool over_unix, bool device_bound) {
  auto& socket = slot(peer, purpose, rail);
  if (!socket.fd) --missing_;  // else it replaces one that the peer gave up
  socket = std::move(connected);
  const auto& nic = nics_[static_cast<std::size_t>(rail)];
  const auto local = SocketAddress::local_of(socket.fd.get()), remote = SocketAddress::remote_of(socket.fd.get());
  socket.rail = rail;
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
    tune_socket(socket.fd.get(), purpose == Purpose::control ? Limit(control_unacknowledged) : std::nullopt);
    // What was accepted has its listener's, which suits ranks of this kernel.
    const std::string congestion = congestion_control(peer);
    if (congestion.empty()) set_congestion_control(socket.fd.get(), default_congestion_control());
  }
}

}  // namespace holmes
