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

std::vector<int> labels_of(const CommunicatorOptions& options, std::vector<int> members) {
  for (int& member : members) member = label_of(options, member);
  return members;
}

CommunicatorOptions part_options(const CommunicatorOptions& whole, std::string name, const std::vector<int>& members,
                                 int rank) {
  CommunicatorOptions part = whole;
  part.name = std::move(name);
  part.size = static_cast<int>(members.size());
  part.rank = rank;
  part.labels = labels_of(whole, members);
  part.clusters.clear();
  part.cluster_names.clear();
  for (const int member : members) {
    const auto index = static_cast<std::size_t>(member);
    if (!whole.clusters.empty()) part.clusters.push_back(whole.clusters[index]);
    if (!whole.cluster_names.empty()) part.cluster_names.push_back(whole.cluster_names[index]);
  }
  return part;
}

void keep_from_rdma(CommunicatorOptions& options) {
  options.rdma_ports.clear();
  if (options.transport == Transport::rdma) options.transport = Transport::automatic;
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
  check_range("turn", options.turn, last_turn);
  if (options.turn && !options.priority)
    throw UsageError("turn=" + std::to_string(*options.turn) +
                     " is the place among groups of one priority, but there is no priority; give priority=, 0 to " +
                     std::to_string(highest_priority) + ", too");
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
