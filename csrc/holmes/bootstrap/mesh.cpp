#include "holmes/bootstrap/mesh.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/mesh_builder.hpp"
#include "holmes/bootstrap/rdma_setup.hpp"
#include "holmes/bootstrap/rendezvous.hpp"
#include "holmes/bootstrap/secret.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"
#include "holmes/discover/host.hpp"
#include "holmes/tls/openssl.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

constexpr std::size_t secret_bytes = 32;
constexpr std::size_t token_bytes = 16;

void check_options(const CommunicatorOptions& options, const Env& env) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    throw UsageError("rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
                     " ranks is not possible: it must be from 0 to size - 1; check RANK and WORLD_SIZE");
  }
  for (const auto* nics : {&options.nics, &options.cluster_nics}) {
    if (nics->size() <= max_rails) continue;
    throw UsageError(std::to_string(nics->size()) + " NICs are too many: two ranks use at most " +
                     std::to_string(max_rails) + "; name fewer");
  }
  if (options.transport == Transport::shm && !env.shm) {
    throw UsageError("transport shm is asked for, but HOLMES_SHM=0 forbids shared memory; unset it or use tcp");
  }
  if (options.transport == Transport::rdma) {
    if (options.tls.value_or(TlsMode::off) != TlsMode::off)
      throw UsageError("transport rdma has no encryption, but tls='" + name(*options.tls) +
                       "' is asked for; use transport tcp, or tls='off' on networks that nobody else reaches");
  }
  check_values(options);
  if (!options.labels.empty() && options.labels.size() != static_cast<std::size_t>(options.size))
    throw UsageError("labels names " + std::to_string(options.labels.size()) + " ranks, but there are " +
                     std::to_string(options.size) + "; give one for each rank, or none");
}

std::string label(const std::vector<RankInfo>& records, std::size_t rank) {
  return "rank " + std::to_string(records[rank].label) + " (host " + records[rank].host + ")";
}

// Where the system does not say which machine this is (no /proc), the host's name does, as it did for the choice of
// NICs.
bool on_one_host(const RankInfo& one, const RankInfo& other) {
  if (one.machine.empty() && other.machine.empty()) return one.host == other.host;
  return one.same_machine(other);
}

// Throws where the NICs cannot join ranks that are on different hosts.
void check_rails_across_hosts(const std::vector<RankInfo>& records, std::size_t rank, std::size_t other,
                              const RailRange& rails) {
  const auto both = label(records, rank) + " and " + label(records, other) + " are on different hosts, but ";
  ErrorContext context{.peer = records[rank].label, .host = records[rank].host};
  if (!records[rank].chose_nics) {
    throw UsageError(both + label(records, rank) + " was given no NIC; name the NICs of every rank", context);
  }
  for (std::size_t i = rails.first; i < rails.end; ++i) {
    const auto& rail = records[rank].rails[i];
    if (!is_loopback(rail.address)) continue;
    context.nic = rail.interface;
    throw NicError(both + label(records, rank) + " uses " + rail.interface + " " + rail.address +
                       ", which no other host can reach; choose a NIC that joins them",
                   context);
  }
}

// Throws where `ranks` cannot be joined by the NICs that all ranks share or, `inside` a cluster, by the cluster's.
void check_rails(const std::vector<RankInfo>& records, const std::vector<std::size_t>& ranks, bool inside) {
  const auto rails_of = [&](std::size_t rank) {
    const auto& record = records[rank];
    return inside ? RailRange{record.shared_rails(), record.rails.size()} : RailRange{0, record.shared_rails()};
  };
  const std::size_t first = ranks.front();
  const auto expected = rails_of(first);
  std::optional<std::size_t> elsewhere;  // a rank on another host than the first
  for (const std::size_t rank : ranks) {
    const auto rails = rails_of(rank);
    const auto require = [&](bool holds, const std::string& problem_and_fix) {
      if (holds) return;
      throw UsageError(label(records, first) + " and " + label(records, rank) + problem_and_fix,
                       {.peer = records[rank].label, .host = records[rank].host});
    };
    require(rails.size() == expected.size(), " use " + std::to_string(expected.size()) + " and " +
                                                 std::to_string(rails.size()) + " NICs" +
                                                 (inside ? " inside their cluster" : "") + "; give every rank" +
                                                 (inside ? " of it" : "") + " the same number");
    for (std::size_t i = 0; i < rails.size(); ++i) {
      const auto& mine = records[first].rails[expected.first + i];
      const auto& theirs = records[rank].rails[rails.first + i];
      const auto is_ipv6 = [](const RailAddress& rail) { return rail.address.find(':') != std::string::npos; };
      require(is_ipv6(theirs) == is_ipv6(mine), " use the addresses " + mine.address + " and " + theirs.address +
                                                    " for one NIC, of different families; use IPv4 or IPv6 on all "
                                                    "ranks");
    }
    if (!elsewhere && !on_one_host(records[rank], records[first])) elsewhere = rank;
  }
  for (const std::size_t rank : ranks) {
    if (!elsewhere) return;
    const bool is_with_first = on_one_host(records[rank], records[first]);
    check_rails_across_hosts(records, rank, is_with_first ? *elsewhere : first, rails_of(rank));
  }
}

// Throws where the ranks' records do not fit together. All ranks see the same records, hence the same error.
void check_rank_infos(const std::vector<RankInfo>& records, Transport transport) {
  const auto& first = records.front();
  for (std::size_t r = 1; r < records.size(); ++r) {
    const auto& record = records[r];
    const auto both = label(records, 0) + " and " + label(records, r);
    const auto require = [&](bool holds, const std::string& problem_and_fix) {
      if (!holds) throw UsageError(both + problem_and_fix, {.peer = record.label, .host = record.host});
    };
    require(
        record.has_secret == first.has_secret,
        ": only one of them was given a secret; give every rank the same HOLMES_SECRET or HOLMES_SECRET_FILE, or none");
    require(record.tls == first.tls, " ask for different TLS, '" + name(first.tls) + "' and '" + name(record.tls) +
                                         "'; give every rank the same tls (HOLMES_TLS)");
    require(record.integrity == first.integrity,
            ": only one of them checks integrity; give every rank the same integrity (HOLMES_INTEGRITY)");
    require(record.integrity_digest_every == first.integrity_digest_every,
            " compare results every " + std::to_string(first.integrity_digest_every) + " and " +
                std::to_string(record.integrity_digest_every) +
                " operations; give every rank the same integrity_digest_every (HOLMES_INTEGRITY_DIGEST_EVERY)");
    const auto require_same = [&](const std::string& option, std::optional<int> mine, std::optional<int> theirs) {
      const auto text = [&](std::optional<int> value) {
        return value ? option + "=" + std::to_string(*value) : "no " + option;
      };
      require(mine == theirs,
              " have " + text(mine) + " and " + text(theirs) + "; give every rank the same " + option + ", or none");
    };
    require_same("priority", first.priority, record.priority);
    require_same("turn", first.turn, record.turn);
    require_same("dscp", first.dscp, record.dscp);
    require_same("wide_min_ranks", first.wide_min_ranks, record.wide_min_ranks);
    require(record.transport == first.transport, " ask for different transports; use the same on all ranks");
    require(record.shared_memory_bytes == first.shared_memory_bytes,
            " ask for shared memory of " + std::to_string(first.shared_memory_bytes) + " and " +
                std::to_string(record.shared_memory_bytes) + " bytes; use the same on all ranks");
    require(record.cluster.empty() == first.cluster.empty(),
            ": only one of them was given the ranks' clusters; give them to every rank, or to none");
    require(record.runs_flat == first.runs_flat,
            ": only one of them was told never to run hierarchically; give every rank the same hierarchical_min_bytes "
            "(HOLMES_HIERARCHICAL_MIN_BYTES)");
    require(transport != Transport::shm || record.can_share_memory(first),
            " cannot share memory: they do not share a host (its kernel, network namespace and user); use transport "
            "automatic or tcp");
  }
  if (transport == Transport::rdma) check_rdma(records);
  std::vector<std::size_t> everybody;
  std::map<std::string, std::vector<std::size_t>> clusters;
  for (std::size_t r = 0; r < records.size(); ++r) {
    everybody.push_back(r);
    if (!records[r].cluster.empty()) clusters[records[r].cluster].push_back(r);
  }
  check_rails(records, everybody, false);
  for (const auto& [name, members] : clusters) check_rails(records, members, true);
}

// Throws where the others' clusters are not what this rank was told: it would use other NICs than they.
void check_clusters(const std::vector<RankInfo>& records, const std::vector<int>& clusters, int own_rank) {
  for (std::size_t r = 0; r < clusters.size(); ++r) {
    if (records[r].cluster == std::to_string(clusters[r])) continue;
    throw UsageError(label(records, r) + " says that it is in cluster " + records[r].cluster + ", but " +
                         label(records, static_cast<std::size_t>(own_rank)) + " was told that it is in cluster " +
                         std::to_string(clusters[r]) + "; give all ranks the same list of clusters",
                     {.peer = records[r].label, .host = records[r].host});
  }
}

// Says whose failure it is, for the ranks that hear of it.
[[noreturn]] void throw_as_own(const HolmesError& error, int rank, const std::string& host) {
  auto context = error.context();
  context.rank = rank;
  if (context.host.empty()) context.host = host;
  throw_error(error.kind(), "rank " + std::to_string(rank) + " (host " + host + "): " + error.what(), context);
}

// TLS keeps out who listens; who can read the Store could pose as a rank.
void warn_of_shared_secret(const std::string& communicator) {
  static std::once_flag warned;
  std::call_once(warned, [&] {
    log(LogLevel::warn, 0,
        "communicator '" + communicator +
            "' uses TLS with a secret that rank 0 made and shares through the store: who can read the store can pose "
            "as a rank; give every rank HOLMES_SECRET_FILE or HOLMES_SECRET");
  });
}

std::vector<NicBinding> checked_nics(const CommunicatorOptions& options) {
  if (options.nics.empty() && options.transport == Transport::shm) return {{"lo", "127.0.0.1"}};  // not used
  auto nics = options.nics.empty() ? std::vector<NicBinding>{{"lo", "127.0.0.1"}} : options.nics;
  if (!options.clusters.empty()) nics.insert(nics.end(), options.cluster_nics.begin(), options.cluster_nics.end());
  for (const auto& nic : nics) check_nic(nic);
  return nics;
}

Mesh build(Rendezvous& rendezvous, const CommunicatorOptions& options, const Env& env, std::size_t shared_memory_bytes,
           Clock::time_point deadline) {
  RankInfo own;
  own.host = host_name();
  own.machine = machine_identity();
  own.user = std::to_string(::getuid());
  own.shared_memory_bytes = shared_memory_bytes;
  own.transport = options.transport;
  own.chose_nics = !options.nics.empty();
  own.tls = *options.tls;
  own.integrity = *options.integrity;
  own.integrity_digest_every = *options.integrity_digest_every;
  own.priority = options.priority;
  own.turn = options.turn;
  own.dscp = options.dscp;
  own.wide_min_ranks = options.wide_min_ranks.value_or(env.wide_min_ranks);
  if (!options.clusters.empty()) {
    own.cluster = std::to_string(options.clusters[static_cast<std::size_t>(options.rank)]);
    own.runs_flat = options.hierarchical_min_bytes == never_hierarchical;
    if (options.transport != Transport::shm) own.cluster_rails = options.cluster_nics.size();
  }
  std::optional<MeshBuilder> builder;
  std::optional<std::string> secret;
  RdmaDevices devices;
  try {
    devices = open_rdma(options, env, own);
    secret = given_secret(options.secret, env);
    own.has_secret = secret.has_value();
    // As text, so that any store can hold it.
    if (!secret && options.rank == 0) own.made_secret = to_hex(random_bytes(secret_bytes));
    if (options.transport != Transport::tcp && env.shm) own.unix_token = "holmes-" + to_hex(random_bytes(token_bytes));
    builder.emplace(options, env, checked_nics(options), shared_memory_bytes);
    if (options.size > 1) builder->listen(own);
    if (own.tls != TlsMode::off) tls::openssl();  // where there is none, say so now
  } catch (const HolmesError& error) {
    throw_as_own(error, label_of(options, options.rank), own.host);
  }
  if (options.size == 1) {
    Mesh alone;
    alone.peers.resize(1);
    alone.hosts = {own.host};
    return alone;
  }
  rendezvous.publish(own, secret.value_or(""));
  auto records = rendezvous.gather();
  for (std::size_t r = 0; r < records.size(); ++r) records[r].label = label_of(options, static_cast<int>(r));
  check_rank_infos(records, options.transport);
  check_clusters(records, options.clusters, options.rank);
  if (!secret && own.tls != TlsMode::off && options.rank == 0) warn_of_shared_secret(options.name);
  if (!secret) secret = records.front().made_secret;
  try {
    const auto look_around = [&] { rendezvous.look_for_alarm(); };
    Mesh mesh = builder->connect(records, group_secret(*secret, rendezvous.digest()), deadline, look_around);
    mesh.no_rdma = connect_rdma(mesh, records, options, devices, deadline, look_around);
    return mesh;
  } catch (const SystemError& error) {
    if (error.context().rank) throw;  // another's
    throw_as_own(error, label_of(options, options.rank), own.host);
  }
}

}  // namespace

std::vector<int> Mesh::sockets() const {
  std::vector<int> fds;
  for (const auto& connections : peers)
    for (const auto* purpose : {&connections.control, &connections.collective, &connections.p2p})
      for (const auto& socket : *purpose) fds.push_back(socket.fd.get());
  for (const auto& connections : peers)
    for (const int fd : connections.rdma.descriptors) fds.push_back(fd);
  return fds;
}

Mesh connect_mesh(Store& store, const CommunicatorOptions& given_options, std::size_t shared_memory_bytes) {
  const auto env = Env::read();
  check_options(given_options, env);
  auto options = given_options;
  if (env.connect_timeout) options.connect_timeout = *env.connect_timeout;
  if (!options.tls) options.tls = tls_mode_from_name(env.tls);
  if (!options.integrity) options.integrity = env.integrity;
  if (!options.integrity_digest_every) options.integrity_digest_every = env.integrity_digest_every;
  hold_standard_descriptors();
  const auto deadline = Clock::now() + options.connect_timeout;
  Rendezvous rendezvous(store, options, deadline);
  if (options.size == 1) return build(rendezvous, options, env, shared_memory_bytes, deadline);
  raise_open_files_limit();

  std::optional<Mesh> mesh;
  std::optional<Failure> failure;
  try {
    mesh = build(rendezvous, options, env, shared_memory_bytes, deadline);
  } catch (const HolmesError& error) {
    failure = failure_of(error);
  } catch (const std::exception& error) {  // not ours: of the store, or an interrupt
    const std::string what = error.what();
    try {
      rendezvous.raise_alarm({ErrorKind::job, "rank " + std::to_string(label_of(options, options.rank)) + " (host " +
                                                  host_name() +
                                                  ") gave up the set-up: " + what.substr(0, what.find('\n'))});
    } catch (const std::exception&) {  // the store is gone: nobody to tell
    }
    throw;
  }
  if (failure) log(LogLevel::info, label_of(options, options.rank), failure->message);
  std::optional<Failure> decision;
  try {
    decision = rendezvous.agree(failure);
  } catch (const HolmesError&) {
    if (!failure) throw;
    decision = failure;  // the store is gone: the own failure says more
  }
  if (decision) decision->raise();
  rendezvous.forget();
  if (mesh->no_rdma)
    log(LogLevel::info, label_of(options, options.rank),
        "communicator '" + options.name + "' uses TCP, not RDMA: " + *mesh->no_rdma);
  return std::move(*mesh);
}

}  // namespace holmes
