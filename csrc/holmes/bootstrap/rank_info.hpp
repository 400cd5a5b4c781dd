// RankInfo: what ranks tell each other through the Store while a communicator is set up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "holmes/bootstrap/sealed_fields.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/options.hpp"

namespace holmes {

// Where a rank listens on one rail.
struct RailAddress {
  std::string interface;
  std::string address;
  std::uint16_t port = 0;
  // Port for ranks of the same machine where `port` is tied to a device: their packets do not come in by it.
  std::uint16_t local_port = 0;
};

// The rails of a pair of ranks: numbers `first` to `end - 1` in the lists of both.
struct RailRange {
  std::size_t first = 0;
  std::size_t end = 0;

  std::size_t size() const { return end - first; }
  bool contains(std::size_t rail) const { return rail >= first && rail < end; }
};

// A port of an HCA that carries a rank's data.
struct CarryingPort {
  std::string name;    // "mlx5_0:1"
  std::string fabric;  // equal on ports that can talk: "InfiniBand", "RoCE v2"
};

// Everything the others need to connect to a rank.
struct RankInfo {
  std::string host;        // for messages
  std::string machine;     // machine_identity(); empty: unknown
  std::string user;        // user id
  std::string unix_token;  // abstract Unix socket; empty: shared memory is off
  std::uint64_t shared_memory_bytes = 0;
  Transport transport = Transport::automatic;
  TlsMode tls = TlsMode::off;
  bool integrity = false;
  int integrity_digest_every = 0;
  std::optional<int> priority{};
  std::optional<int> turn{};
  std::optional<int> dscp{};
  int wide_min_ranks = Env{}.wide_min_ranks;
  bool chose_nics = true;                // false: loopback by default
  bool has_secret = false;               // was given one
  std::string made_secret;               // by rank 0, where it was given none
  std::string cluster;                   // equal on ranks of one cluster; empty: the ranks name none
  bool runs_flat = false;                // no operation over the clusters is hierarchical
  std::size_t cluster_rails = 0;         // so many of the rails, the last ones, join the ranks of the cluster only
  std::vector<CarryingPort> rdma_ports;  // that may carry its data
  std::string no_rdma;                   // why there are none, where others may have some: what follows its name
  std::vector<RailAddress> rails;
  int label = 0;  // what messages call it, see CommunicatorOptions::labels; not told

  std::size_t shared_rails() const { return rails.size() - cluster_rails; }
  // The same from both sides, once check_rank_infos has passed.
  RailRange rails_to(const RankInfo& other) const {
    const bool inside = !cluster.empty() && cluster == other.cluster && cluster_rails > 0;
    return inside ? RailRange{shared_rails(), rails.size()} : RailRange{0, shared_rails()};
  }
  bool same_cluster(const RankInfo& other) const { return cluster == other.cluster; }
  bool same_machine(const RankInfo& other) const { return !machine.empty() && machine == other.machine; }
  bool same_kernel(const RankInfo& other) const {
    return !machine.empty() && machine.substr(0, machine.find(':')) == other.machine.substr(0, other.machine.find(':'));
  }
  bool can_share_memory(const RankInfo& other) const {
    return same_machine(other) && user == other.user && !unix_token.empty() && !other.unix_token.empty();
  }
};

// Values of the Store. A record starts with the protocol version; `decode_*` throw ProtocolError naming `writer` where
// the version differs, the bytes make no sense or a field was changed (see SealedReader, also for `written`). A rank
// that failed writes its failure instead: decode_rank raises it. Failures and successes are not sealed: who changes
// them can end a set-up, and nothing else.
std::string encode(const RankInfo& record, const Seal& seal);
std::string encode(const Failure& failure);
std::string encode_success();
RankInfo decode_rank(const std::string& bytes, const std::string& writer, const Seal& seal,
                     const std::string* written = nullptr);
// Nothing: success.
std::optional<Failure> decode_outcome(const std::string& bytes, const std::string& writer);

// "60 s", "0.250 s".
std::string seconds_text(Duration duration);

}  // namespace holmes
