#include "holmes/comm/communicator.hpp"

#include <thread>

#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/comm/hierarchical_communicator.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

using namespace std::chrono_literals;

constexpr Duration drain_interval = 2ms;

struct Progress {
  bool is_pending = false;
  std::uint64_t entered = 0, count = 0, bytes = 0;
  bool operator==(const Progress&) const = default;
};

Progress progress_of(const Communicator& communicator) {
  Progress progress;
  for (const auto& record : communicator.flight_record()) {
    progress.entered += record.entered;
    if (!record.state) {  // its driver is busy: something is under way
      progress.is_pending = progress.is_pending || !record.failure;
      continue;
    }
    progress.is_pending = progress.is_pending || record.state->pending_count > 0;
    progress.count += record.state->pending_count;
    for (const auto& operation : record.state->pending)
      for (const auto& peer : operation.peers) progress.bytes += peer.received_bytes + peer.sent_bytes;
  }
  return progress;
}

}  // namespace

void drain(Communicator& communicator, Duration max_silence) {
  Progress last;
  auto moved = Clock::now();
  while (!communicator.is_dead()) {
    const auto progress = progress_of(communicator);
    if (!progress.is_pending) return;
    const auto now = Clock::now();
    if (progress != last) last = progress, moved = now;
    if (now - moved >= max_silence) return;
    std::this_thread::sleep_for(drain_interval);
  }
}

// A group on NICs of its own, or one that spans clusters.
std::shared_ptr<Communicator> make_communicator(std::shared_ptr<Store> store, CommunicatorOptions options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    throw UsageError("rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
                     " is not possible; size must be at least 1 and rank from 0 to size - 1");
  if (!options.tls) options.tls = tls_mode_from_name(Env::read().tls);
  if (!options.integrity) options.integrity = Env::read().integrity;
  if (!options.integrity_digest_every) options.integrity_digest_every = Env::read().integrity_digest_every;
  if (options.nics.empty() && options.size > 1 && options.transport != Transport::shm)
    options.nics = default_nics(*store, options);
  if (options.clusters.empty()) return std::make_shared<HostCommunicator>(std::move(store), std::move(options));
  if (options.clusters.size() != static_cast<std::size_t>(options.size))
    throw UsageError("clusters names the clusters of " + std::to_string(options.clusters.size()) +
                     " ranks, but there " + "are " + std::to_string(options.size) + "; give one for each rank");
  const Hierarchy hierarchy(options.clusters, options.rank);
  if (!options.hierarchical_min_bytes) options.hierarchical_min_bytes = Env::read().hierarchical_min_bytes;
  if (hierarchy.is_useful()) {
    if (options.hierarchical_min_bytes != never_hierarchical)
      return std::make_shared<HierarchicalCommunicator>(std::move(store), std::move(options));
    return std::make_shared<HostCommunicator>(std::move(store), std::move(options));
  }
  if (hierarchy.cluster_count() == 1 && !options.cluster_nics.empty()) options.nics = std::move(options.cluster_nics);
  // One cluster, or each rank in another.
  if (options.tls == TlsMode::clusters) options.tls = hierarchy.cluster_count() == 1 ? TlsMode::off : TlsMode::all;
  options.clusters.clear();
  options.cluster_nics.clear();
  return std::make_shared<HostCommunicator>(std::move(store), std::move(options));
}

}  // namespace holmes
