// The connecting side of MeshBuilder.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "holmes/bootstrap/mesh_builder.hpp"
#include "holmes/core/log.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

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

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

bool can_bind_device(const NicBinding& nic) { return nic.interface != "lo" || is_loopback(nic.address); }

void MeshBuilder::start(Attempt& attempt) {
  const auto& peer = (*records_)[static_cast<std::size_t>(attempt.peer)];
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
                                      congestion_control(attempt.peer), system_errno);
  }
  if (!attempt.socket.fd) return retry(attempt, errno_text(system_errno), system_errno);
  Hello hello;
  hello.purpose = attempt.purpose;
  hello.rail = static_cast<std::uint8_t>(attempt.rail);
  hello.rank = static_cast<std::uint32_t>(options_.rank);
  hello.group = group_hash(options_.name);
  attempt.handshake =
      Handshake::connecting(hello, static_cast<std::uint32_t>(attempt.peer), secret_, attempt.over_unix);
  attempt.tls.reset();
  attempt.is_connected = false;
  attempt.deadline = Clock::now() + handshake_timeout;
}

void MeshBuilder::advance(Attempt& attempt) {
  if (!attempt.is_connected) {
    if (const int error = socket_error(attempt.socket.fd.get())) return retry(attempt, errno_text(error), error);
    attempt.is_connected = true;
  }
  const auto step = attempt.tls ? Handshake::Step::done : attempt.handshake->step(attempt.socket.fd.get());
  if (step == Handshake::Step::failed) {
    if (attempt.handshake->proof_refused() || attempt.handshake->other_version()) ++attempt.refusals;
    return retry(attempt, attempt.handshake->failure());
  }
  // From here on the peer decides how long it takes: if we left now, it might count us in.
  if (attempt.handshake->awaits_proof()) attempt.deadline = Clock::time_point::max();
  if (step != Handshake::Step::done) return;
  auto& link = mesh_.links[static_cast<std::size_t>(attempt.peer)];
  if (attempt.over_unix) {
    link.shared_memory = attempt.handshake->take_descriptor();
    link.shared_memory_bytes = shared_memory_bytes_;
    if (!is_good_shared_memory(link.shared_memory.get(), shared_memory_bytes_)) {
      throw ProtocolError(describe(attempt.peer) + " passed no sealed shared memory of " +
                              std::to_string(shared_memory_bytes_) +
                              " bytes; install the same version of Holmes everywhere or set HOLMES_SHM=0",
                          {.rank = options_.rank, .peer = attempt.peer, .host = link.host});
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
  fill(attempt.peer, attempt.purpose, attempt.rail,
       {.fd = std::move(attempt.socket.fd), .info = {}, .tls = std::move(attempt.tls)}, attempt.over_unix,
       attempt.socket.device_bound);
  attempt.is_done = true;
}

void MeshBuilder::retry(Attempt& attempt, const std::string& failure, int system_errno) {
  const auto now = Clock::now();
  if (log_enabled(LogLevel::debug)) {
    log(LogLevel::debug, options_.rank, "connecting to " + describe(attempt.peer) + " failed: " + failure);
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
  const auto own =
      "rank " + std::to_string(options_.rank) + " (host " + mesh_.hosts[static_cast<std::size_t>(options_.rank)] + ")";
  ErrorContext context{.rank = options_.rank, .peer = attempt.peer, .host = peer.host};
  std::string path = "a Unix socket";
  if (!attempt.over_unix) {
    const auto& nic = nics_[static_cast<std::size_t>(attempt.rail)];
    const auto& rail = peer.rails[static_cast<std::size_t>(attempt.rail)];
    context.nic = nic.interface;
    path = "NIC " + nic.interface + ": " + nic.address + " -> " +
           SocketAddress::parse(rail.address, rail.port, nic.interface).text();
  }
  if (attempt.refusals > 0 && attempt.handshake && attempt.handshake->other_version()) {
    throw ProtocolError(describe(attempt.peer) + " and " + own + " cannot talk: " + attempt.last_failure +
                            "; install the same version of Holmes on every host (over " + path + ")",
                        context);
  }
  if (attempt.refusals >= max_refusals) {
    throw ProtocolError(describe(attempt.peer) + " refused the proof of " + own + " (over " + path +
                            "): their secrets differ; give every rank the same HOLMES_SECRET or HOLMES_SECRET_FILE",
                        context);
  }
  if (attempt.last_errno != 0) context.system_errno = attempt.last_errno;
  throw UnreachableError(
      describe(attempt.peer) + " cannot be reached from " + own + " over " + path + ": " + attempt.last_failure +
          "; check that this NIC has a route to that address and no firewall is in the way, or choose a "
          "NIC that all ranks of the communicator share",
      context);
}

void MeshBuilder::throw_no_tls(int peer, int rail, const std::string& failure) const {
  const auto& nic = nics_[static_cast<std::size_t>(rail)];
  throw ProtocolError(
      describe(peer) + " proved the secret, but TLS with it over NIC " + nic.interface + " fails: " + failure +
          "; give every rank the same tls (HOLMES_TLS), and check that nothing between the hosts "
          "changes what they send",
      {.rank = options_.rank, .peer = peer, .host = mesh_.hosts[static_cast<std::size_t>(peer)], .nic = nic.interface});
}

void MeshBuilder::throw_incomplete() const {
  // An own attempt knows more than a connection that did not come; a failed one more than one under way.
  const Attempt* best = nullptr;
  for (const auto& attempt : attempts_) {
    if (best == nullptr || (best->last_failure.empty() && !attempt.last_failure.empty())) best = &attempt;
  }
  if (best != nullptr) {
    auto attempt_text = best->last_failure.empty() ? "no answer" : best->last_failure;
    Attempt copy{.peer = best->peer, .purpose = best->purpose, .rail = best->rail, .over_unix = best->over_unix};
    copy.last_failure = attempt_text + " within " + seconds_text(options_.connect_timeout);
    copy.last_errno = best->last_failure.empty() ? ETIMEDOUT : best->last_errno;
    give_up(copy);
  }
  for (int peer = options_.rank + 1; peer < options_.size; ++peer) {
    const auto& link = mesh_.links[static_cast<std::size_t>(peer)];
    const bool shm = shares_memory(peer);
    const auto rails = shm ? RailRange{0, 1} : rails_to(peer);
    for (std::size_t rail = rails.first; rail < rails.end; ++rail) {
      const auto i = rail - rails.first;
      const bool stands = link.control[i].fd && (shm || (link.collective[i].fd && link.p2p[i].fd));
      if (stands) continue;
      const auto& record = (*records_)[static_cast<std::size_t>(peer)];
      const auto& nic = nics_[rail];
      throw UnreachableError(
          describe(peer) + " did not connect to rank " + std::to_string(options_.rank) + " (host " +
              mesh_.hosts[static_cast<std::size_t>(options_.rank)] + ") over " +
              (shm ? "a Unix socket"
                   : "NIC " + nic.interface + ": " + record.rails[rail].address + " -> " + nic.address) +
              " within " + seconds_text(options_.connect_timeout) +
              "; check that it still runs, that this NIC has a route to that address and no firewall is in the way, or "
              "choose a NIC that all ranks of the communicator share",
          {.rank = options_.rank, .peer = peer, .host = record.host, .nic = shm ? "" : nic.interface});
    }
  }
  throw TimeoutError("the mesh of communicator '" + options_.name + "' is incomplete", {.rank = options_.rank});
}

}  // namespace holmes
