// What a communicator is made of, and what a call may say.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/types.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// One local NIC a communicator uses: the interface and the address its sockets are bound to.
struct NicBinding {
  std::string interface;  // "ib0", "eth1", "lo"
  std::string address;    // numeric IPv4 or IPv6 address of that interface
  bool operator==(const NicBinding&) const = default;
};

// As `hierarchical_min_bytes`: all operations run flat.
inline constexpr std::uint64_t never_hierarchical = UINT64_MAX;

// Tag of receives that serve the library itself (nobody sends such a message): no operations of the user's.
inline constexpr std::uint32_t internal_tag = UINT32_MAX;

// Of CommunicatorOptions::priority.
inline constexpr int highest_priority = 3;
// Of CommunicatorOptions::turn.
inline constexpr int last_turn = 15;
// Of dscp: what differentiated services know, 6 bits.
inline constexpr int max_dscp = 63;

// How ranks of one host reach each other.
enum class Transport {
  automatic,  // shared memory where both ranks are on one host, else RDMA where `rdma_ports` are usable, else TCP
  tcp,        // TCP also between ranks of one host
  shm,        // shared memory only; refused where ranks are on different hosts
  rdma,       // shared memory where both ranks are on one host, else RDMA
};

// Throws UsageError where there is no rank `rank` in a group of `size`.
void check_place(int rank, int size);

// "auto", "tcp", "shm" or "rdma". Throws UsageError for any other name.
Transport transport_from_name(const std::string& name);
std::string name(Transport transport);

// Which TCP connections are encrypted. (Shared memory never leaves the host.)
enum class TlsMode {
  off,
  clusters,  // those between ranks of different clusters
  all,
};

// "off", "clusters" or "all". Throws UsageError for any other name.
TlsMode tls_mode_from_name(const std::string& name);
std::string name(TlsMode mode);

// A new option is a field here and a line in `visit_fields`.
struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::string name = "world";  // appears in every error and log line; the same on all ranks, unique in the store
  // Rails, in the same order on every rank; a NIC named twice gets two connections (where one cannot fill the link).
  // Empty: the best that all ranks share, or loopback on one host (docs/nics.md).
  std::vector<NicBinding> nics{};
  // The HCA ports ("mlx5_0:1") that carry the data, as rails in the same order on every rank, 8 at most; they need no
  // IP address, `nics` are for the set-up and for what tells of failures. Transport::rdma: empty, the ports of `nics`.
  // Transport::automatic: where all ranks' ports reach each other; empty, none. In a group that spans clusters: between
  // ranks of this rank's cluster; between clusters it is TCP.
  std::vector<std::string> rdma_ports{};
  // For a group that spans clusters (docs/hierarchy.md): the number of each rank's cluster, by rank and the same on all
  // of them. Empty: one cluster.
  std::vector<int> clusters{};
  // What reports call them, by rank; processes of one cluster that know it by one name report of its paths together.
  // Empty: by their numbers.
  std::vector<std::string> cluster_names{};
  // As `nics`, in the same order on every rank of this rank's cluster: its ranks talk to each other over these, to all
  // others over `nics`. Empty: over `nics` to all.
  std::vector<NicBinding> cluster_nics{};
  // For metrics: whether its connections are between clusters. Absent: those between ranks of different `clusters`;
  // where that is empty, those to far peers.
  std::optional<bool> between_clusters{};
  // From how many bytes on an operation runs hierarchically; equal on all ranks that give it, `never_hierarchical` by
  // all or none. Absent: HOLMES_HIERARCHICAL_MIN_BYTES, else measured at set-up.
  std::optional<std::uint64_t> hierarchical_min_bytes{};
  std::optional<int> job_rank{};  // this process's number in the job, for diagnosis; absent: the variable RANK, if any
  std::vector<int> labels{};      // number of each rank in messages, by rank; empty: its own
  Transport transport = Transport::automatic;
  Duration timeout = std::chrono::minutes(30);          // deadline of an operation unless the call gives one
  Duration connect_timeout = std::chrono::seconds(60);  // deadline of the set-up
  std::string secret{};          // per-job secret; empty: HOLMES_SECRET, else made by rank 0 and shared by the Store
  std::optional<TlsMode> tls{};  // the same on all ranks; absent: HOLMES_TLS, else off
  // Whether what arrives over TCP and shared memory is compared with what was sent, by CRC32C (what is encrypted is
  // anyway); the same on all ranks. Absent: HOLMES_INTEGRITY, else off.
  std::optional<bool> integrity{};
  // Of how many all_reduce, all_gather and broadcast one has its result compared over the ranks, by CRC32C (0: none);
  // the same on all ranks. Absent: HOLMES_INTEGRITY_DIGEST_EVERY, else none.
  std::optional<int> integrity_digest_every{};
  // Whether broadcast, reduce, gather and scatter end on a rank as soon as its own part is done, as with MPI, and not
  // when every rank has entered them; the same on all ranks. Who is missing is told by a later operation then. Absent:
  // HOLMES_LOCAL_COMPLETION, else not.
  std::optional<bool> local_completion{};
  // 0 to 3, the same on all ranks: where groups share links, higher ones go first (docs/wan.md). Absent: as TCP shares.
  std::optional<int> priority{};
  // 0 to 15, the same on all ranks, beside `priority`: where groups of one priority that have a turn share links, the
  // lowest goes first. Absent: it shares.
  std::optional<int> turn{};
  // Code point (differentiated services) of its packets, 0 to 63, the same on all ranks. Absent: of its priority.
  std::optional<int> dscp{};
  // How long a waiting thread polls before it sleeps, in microseconds (0: not at all). Absent: HOLMES_SPIN_US, else
  // 150.
  std::optional<int> spin_us{};
  // From how many ranks on a group is wide (docs/ranks.md): its ranks are connected by rows and columns
  // and not each with every other one; the same on all ranks, 2 or more. Absent: HOLMES_WIDE_MIN_RANKS, else 257.
  std::optional<int> wide_min_ranks{};

  bool operator==(const CommunicatorOptions&) const = default;
};

// What messages call rank `rank`.
int label_of(const CommunicatorOptions& options, int rank);

// The same of several.
std::vector<int> labels_of(const CommunicatorOptions& options, std::vector<int> members);

// Those of a communicator of `members`, ranks of the one that `whole` is for, in which this rank is number `rank`.
// Messages call them as the whole's do.
CommunicatorOptions part_options(const CommunicatorOptions& whole, std::string name, const std::vector<int>& members,
                                 int rank);

// Of a communicator whose ranks are each of another cluster: between these it is TCP.
void keep_from_rdma(CommunicatorOptions& options);

// Throws UsageError naming a number that is not possible, whatever the other fields are.
void check_values(const CommunicatorOptions& options);

// The code point that its packets have; absent: the system's.
std::optional<int> dscp_of(const CommunicatorOptions& options);

// visit(name, member) for every field, by the name that it has in Python.
template <typename Visit>
void visit_fields(Visit&& visit) {
  using Options = CommunicatorOptions;
  visit("rank", &Options::rank);
  visit("size", &Options::size);
  visit("name", &Options::name);
  visit("nics", &Options::nics);
  visit("rdma_ports", &Options::rdma_ports);
  visit("clusters", &Options::clusters);
  visit("cluster_names", &Options::cluster_names);
  visit("cluster_nics", &Options::cluster_nics);
  visit("between_clusters", &Options::between_clusters);
  visit("hierarchical_min_bytes", &Options::hierarchical_min_bytes);
  visit("job_rank", &Options::job_rank);
  visit("labels", &Options::labels);
  visit("transport", &Options::transport);
  visit("timeout_s", &Options::timeout);
  visit("connect_timeout_s", &Options::connect_timeout);
  visit("secret", &Options::secret);
  visit("tls", &Options::tls);
  visit("integrity", &Options::integrity);
  visit("integrity_digest_every", &Options::integrity_digest_every);
  visit("local_completion", &Options::local_completion);
  visit("priority", &Options::priority);
  visit("turn", &Options::turn);
  visit("dscp", &Options::dscp);
  visit("spin_us", &Options::spin_us);
  visit("wide_min_ranks", &Options::wide_min_ranks);
}

class Compression;

// How an operation is carried out. Values are part of the wire protocol.
// Beside these, where what crosses is compressed: the number of its Codec, with `form_of_differences` that of
// differences.
enum class Form : std::uint8_t { flat = 0, hierarchical = 1, wide = 4 };
inline constexpr std::uint8_t form_of_differences = 16;

// An operation of a wide group. Calls on the group's parts are steps of it, and their ranks compare it.
struct WholeCall {
  OpCode op = OpCode::barrier;
  DType dtype = DType::uint8;
  std::optional<ReduceOp> reduction{};
  std::optional<int> root{};
  Form form = Form::wide;
  std::uint64_t bytes = 0;          // as all ranks know them alike; 0: they do not
  std::uint32_t counts_digest = 0;  // of what all ranks know: their counts, the place in a list; 0: nothing
  std::uint64_t number = 0;         // of the group's operations; not compared
};

// What a calling thread has and others wait for, such as an interpreter's lock.
class CallerLock {
public:
  // More than once, too.
  virtual void let_go() = 0;

protected:
  ~CallerLock() = default;
};

// Of calls that are made as one list: which of how many it is.
struct ListPlace {
  std::uint32_t index = 0;
  std::uint32_t length = 1;
};

// Options every operation takes.
struct CallOptions {
  std::optional<Duration> timeout{};  // absent: the communicator's
  bool async = false;                 // false: the work is final on return (a failed one still throws in wait)
  // all_reduce, reduce_scatter and all_gather over clusters only: how the hop between them is compressed. Null: as the
  // calling thread says (exchange_thread_compression), and not at all where that says nothing or cannot be.
  std::shared_ptr<Compression> compression{};
  // Device memory, sums of floating point only: every rank's contribution is multiplied by this first.
  std::optional<double> premultiply{};
  // Reductions only: ranks that `avg` divides by, where this is one level of a larger operation. Absent: all.
  std::optional<int> average_over{};
  // all_gather only: what the other ranks and the records are told, where it is all that an operation moves.
  OpCode told_as = OpCode::all_gather;
  // Host memory, all_reduce, reduce_scatter and all_gather: compared over the ranks, so that of lists of different
  // length no call meets one that it does not belong to.
  ListPlace in_list{};
  // Host memory: what it is a step of. Null: it is all there is.
  std::shared_ptr<const WholeCall> part_of{};
  // recv only: what Work::source_rank says. Absent: the source.
  std::optional<int> told_source{};
  // Let go of in all that takes longer than what ranks with shared memory do in a microsecond or two. Only where the
  // communicator does so (Communicator::lets_go); null: nothing.
  CallerLock* held = nullptr;
};

}  // namespace holmes
