#include "holmes/core/options.hpp"

#include <array>

#include "holmes/core/error.hpp"

namespace holmes {

void check_place(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    throw UsageError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                     " is not possible; size must be at least 1 and rank from 0 to size - 1");
}

Transport transport_from_name(const std::string& name) {
  if (name == "auto") return Transport::automatic;
  if (name == "tcp") return Transport::tcp;
  if (name == "shm") return Transport::shm;
  if (name == "rdma") return Transport::rdma;
  throw UsageError("transport '" + name + "' does not exist; use one of: auto, tcp, shm, rdma");
}

std::string name(Transport transport) {
  const char* const names[] = {"auto", "tcp", "shm", "rdma"};
  return names[static_cast<int>(transport)];
}

TlsMode tls_mode_from_name(const std::string& name) {
  if (name == "off") return TlsMode::off;
  if (name == "clusters") return TlsMode::clusters;
  if (name == "all") return TlsMode::all;
  throw UsageError("tls '" + name + "' does not exist; use one of: off, clusters, all");
}

std::string name(TlsMode mode) { return mode == TlsMode::off ? "off" : mode == TlsMode::clusters ? "clusters" : "all"; }

int label_of(const CommunicatorOptions& options, int rank) {
  const auto index = static_cast<std::size_t>(rank);
  return index < options.labels.size() ? options.labels[index] : rank;
}

std::vector<int> clusters_of(const CommunicatorOptions& options, const std::vector<int>& members) {
  std::vector<int> clusters;
  for (const int member : members)
    if (!options.clusters.empty()) clusters.push_back(options.clusters[static_cast<std::size_t>(member)]);
  return clusters;
}

std::vector<std::string> cluster_names_of(const CommunicatorOptions& options, const std::vector<int>& members) {
  std::vector<std::string> names;
  for (const int member : members)
    if (!options.cluster_names.empty()) names.push_back(options.cluster_names[static_cast<std::size_t>(member)]);
  return names;
}

void check_values(const CommunicatorOptions& options) {
  if (options.integrity_digest_every.value_or(0) < 0) {
    throw UsageError("integrity_digest_every=" + std::to_string(*options.integrity_digest_every) +
                     " is not possible; it must be a number of operations, or 0 to compare no results");
  }
  const auto check_range = [](const char* option, std::optional<int> value, int most) {
    if (value && (*value < 0 || *value > most))
      throw UsageError(std::string(option) + "=" + std::to_string(*value) + " is not possible; it must be from 0 to " +
                       std::to_string(most));
  };
  check_range("priority", options.priority, highest_priority);
  check_range("dscp", options.dscp, max_dscp);
  if (options.wide_min_ranks.value_or(2) < 2)
    throw UsageError("wide_min_ranks=" + std::to_string(*options.wide_min_ranks) +
                     " is not possible; it must be a number of ranks, 2 or more");
}

std::optional<int> dscp_of(const CommunicatorOptions& options) {
  // By priority: lower effort (RFC 8622), AF11, AF21 and AF41 (RFC 2597). None is of those that RoCE's lossless queues
  // usually have (24 to 31, 48).
  constexpr std::array<int, highest_priority + 1> usual{1, 10, 18, 34};
  if (options.dscp || !options.priority) return options.dscp;
  return usual[static_cast<std::size_t>(*options.priority)];
}

}  // namespace holmes
