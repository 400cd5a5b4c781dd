// Communicators over emulated clusters: ranks as threads on loopback, each cluster's NICs with an address of their own.
#pragma once

#include "holmes/reduce/compression.hpp"
#include "ranks.hpp"

namespace holmes::test {

inline CommunicatorOptions cluster_options(const std::vector<int>& clusters, int rank,
                                           std::optional<std::uint64_t> min_bytes) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = static_cast<int>(clusters.size());
  options.name = "test";
  options.transport = Transport::tcp;
  options.timeout = std::chrono::seconds(60);
  options.connect_timeout = std::chrono::seconds(20);
  options.nics = {{"lo", "127.0.0.1"}};
  options.clusters = clusters;
  options.cluster_nics = {{"lo", "127.0.1." + std::to_string(clusters[static_cast<std::size_t>(rank)] + 1)}};
  options.hierarchical_min_bytes = min_bytes;
  return options;
}

// `body(communicator)` on every rank; `clusters[r]` is the cluster of rank r.
inline void run_clusters(
    const std::vector<int>& clusters, std::optional<std::uint64_t> min_bytes,
    const std::function<void(Communicator&)>& body,
    const std::function<void(CommunicatorOptions&)>& change = [](CommunicatorOptions&) {}) {
  const auto store = make_local_store();
  run_ranks(static_cast<int>(clusters.size()), [&](int rank) {
    CommunicatorOptions options = cluster_options(clusters, rank, min_bytes);
    change(options);
    const auto communicator = make_communicator(store, options);
    body(*communicator);
  });
}

}  // namespace holmes::test
