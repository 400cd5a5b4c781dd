// How the ranks of a new communicator introduce themselves to each other.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "holmes/comm/host_communicator.hpp"
#include "holmes/core/log.hpp"
#include "holmes/record/dump.hpp"

namespace holmes {
namespace {

constexpr std::int64_t no_job_rank = -1;  // on the wire only

// The process's number in the job, where it has one.
std::optional<std::int64_t> job_rank_of(const CommunicatorOptions& options) {
  if (options.job_rank) return options.job_rank;
  const char* text = std::getenv("RANK");
  char* end = nullptr;
  const long rank = text ? std::strtol(text, &end, 10) : -1;
  if (rank < 0 || !end || *end != '\0') return std::nullopt;
  return rank;
}

}  // namespace

std::vector<CommunicatorRecord> HostCommunicator::flight_record() const {
  engine_->records().request_state();
  return {engine_->records().record(Clock::now() + record_patience)};
}

// The first operation: what all ranks say of themselves, the slice size all can work with, and whether every pair
// shares memory.
void HostCommunicator::introduce(const Mesh& mesh, std::size_t slice_bytes) {
  struct Introduction {
    std::uint64_t wish = 0;
    std::uint64_t random = 0;  // rank 0's makes the communicator's number
    std::int64_t pid = 0;
    std::int64_t job_rank = no_job_rank;
  };
  constexpr std::size_t words = sizeof(Introduction) / sizeof(std::uint64_t);
  constexpr std::uint64_t shared_memory_bit = std::uint64_t{1} << 63;
  const bool all_shared = std::all_of(mesh.links.begin(), mesh.links.end(), [](const PeerConnections& link) {
    return link.peer < 0 || link.shared_memory_bytes > 0;
  });
  const auto job_rank = job_rank_of(options_);
  if (job_rank) set_log_rank(static_cast<int>(*job_rank));
  std::random_device random;
  const Introduction mine{slice_bytes | (all_shared ? shared_memory_bit : 0), std::uint64_t{random()} << 32 | random(),
                          ::getpid(), job_rank.value_or(no_job_rank)};
  std::vector<Introduction> all(static_cast<std::size_t>(options_.size), mine);
  std::vector<Buffer> outputs;
  for (auto& one : all) outputs.push_back({&one, words, DType::int64, nullptr});
  const Buffer own = outputs[options_.rank];
  CallOptions call;
  call.timeout = options_.connect_timeout;
  all_gather(std::move(outputs), own, call)->wait();
  Group& agreed = engine_->group();
  agreed.slice_bytes = slice_bytes;
  std::vector<PeerIdentity> identities;
  for (const Introduction& one : all) {
    agreed.all_shared_memory &= (one.wish & shared_memory_bit) != 0;
    agreed.slice_bytes = std::min<std::size_t>(agreed.slice_bytes, one.wish & ~shared_memory_bit);
    const std::size_t rank = identities.size();
    PeerIdentity identity{rank < mesh.hosts.size() ? mesh.hosts[rank] : "", mesh.links[rank].nic, one.pid, {}};
    if (one.job_rank != no_job_rank) identity.job_rank = static_cast<int>(one.job_rank);
    identities.push_back(std::move(identity));
  }
  engine_->records().set_identities(all.front().random, std::move(identities));
}

}  // namespace holmes
