#include "holmes/comm/communicator.hpp"

#include <algorithm>
#include <thread>

#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/comm/hierarchical_communicator.hpp"
#include "holmes/comm/wide_communicator.hpp"
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

std::shared_ptr<PartCommunicator> make_part(std::shared_ptr<Store> store, CommunicatorOptions options) {
  if (WideCommunicator::is_for(options))
    return std::make_shared<WideCommunicator>(std::move(store), std::move(options));
  return std::make_shared<HostCommunicator>(std::move(store), std::move(options));
}

namespace {

// By the environment, and by what the ranks share.
void complete(Store& store, CommunicatorOptions& options) {
  check_place(options.rank, options.size);
  if (!options.tls) options.tls = tls_mode_from_name(Env::read().tls);
  if (!options.integrity) options.integrity = Env::read().integrity;
  if (!options.integrity_digest_every) options.integrity_digest_every = Env::read().integrity_digest_every;
  if (options.nics.empty() && options.size > 1 && options.transport != Transport::shm) set_default_nics(store, options);
}

}  // namespace

std::shared_ptr<PartCommunicator> make_whole_part(std::shared_ptr<Store> store, CommunicatorOptions options) {
  complete(*store, options);
  return make_part(std::move(store), std::move(options));
}

// A group on NICs of its own, or one that spans clusters.
std::shared_ptr<Communicator> make_communicator(std::shared_ptr<Store> store, CommunicatorOptions options) {
  complete(*store, options);
  if (!options.cluster_names.empty() && options.cluster_names.size() != static_cast<std::size_t>(options.size))
    throw UsageError("cluster_names names the clusters of " + std::to_string(options.cluster_names.size()) +
                     " ranks, but there are " + std::to_string(options.size) + "; give one for each rank, or none");
  if (options.clusters.empty()) return make_part(std::move(store), std::move(options));
  if (options.clusters.size() != static_cast<std::size_t>(options.size))
    throw UsageError("clusters names the clusters of " + std::to_string(options.clusters.size()) +
                     " ranks, but there " + "are " + std::to_string(options.size) + "; give one for each rank");
  const Hierarchy hierarchy(options.clusters, options.rank);
  if (!options.hierarchical_min_bytes) options.hierarchical_min_bytes = Env::read().hierarchical_min_bytes;
  if (hierarchy.is_useful()) {
    if (options.hierarchical_min_bytes != never_hierarchical)
      return std::make_shared<HierarchicalCommunicator>(std::move(store), std::move(options));
    return make_part(std::move(store), std::move(options));
  }
  if (hierarchy.cluster_count() == 1 && !options.cluster_nics.empty()) options.nics = std::move(options.cluster_nics);
  // One cluster, or each rank in another.
  if (options.tls == TlsMode::clusters) options.tls = hierarchy.cluster_count() == 1 ? TlsMode::off : TlsMode::all;
  options.between_clusters = hierarchy.cluster_count() > 1;
  if (*options.between_clusters) keep_from_rdma(options);
  options.clusters.clear();
  options.cluster_nics.clear();
  return make_part(std::move(store), std::move(options));
}

std::optional<CommunicatorOptions> split_options(Communicator& comm, const CommunicatorOptions& options, int number,
                                                 int color, int key) {
  if (color < -1)
    throw UsageError("split: color " + std::to_string(color) + " must be 0 or more, or -1 to take no part");
  // Who wants what.
  const auto size = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> wishes(2 * size);
  std::vector<Buffer> outputs;
  for (std::size_t peer = 0; peer < size; ++peer) outputs.push_back({&wishes[2 * peer], 2, DType::int64, nullptr});
  std::int64_t own[2] = {color, key};
  CallOptions call;
  call.told_as = OpCode::split;
  comm.all_gather(std::move(outputs), {own, 2, DType::int64, nullptr}, call)->wait();

  if (color < 0) return std::nullopt;
  std::vector<std::pair<std::int64_t, int>> members;  // (key, rank)
  for (std::size_t peer = 0; peer < size; ++peer)
    if (wishes[2 * peer] == color) members.emplace_back(wishes[2 * peer + 1], static_cast<int>(peer));
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [wish, rank] : members) ranks.push_back(rank);
  const auto own_place = std::ranges::find(ranks, comm.rank()) - ranks.begin();
  CommunicatorOptions part =
      part_options(options, options.name + "/split" + std::to_string(number) + "." + std::to_string(color), ranks,
                   static_cast<int>(own_place));
  part.labels.clear();  // a group of the user's
  return part;
}

namespace {

const std::byte* end_of(const Buffer& buffer) { return buffer.begin() + buffer.bytes(); }

bool share(const Buffer& a, const Buffer& b) {
  return a.count != 0 && b.count != 0 && a.begin() < end_of(b) && b.begin() < end_of(a);
}

std::string place(const char* what, std::size_t index, std::size_t size) {
  return size == 1 ? std::string("the ") + what : std::string(what) + " " + std::to_string(index);
}

[[noreturn]] void refuse(const char* operation, const std::string& one, const std::string& other, bool is_one_written) {
  throw UsageError(std::string(operation) + ": " + one + " and " + other + " share memory, and " +
                   (is_one_written ? "both are written" : "one is written while the other is read") +
                   "; pass a copy of one, or (in place) this rank's whole part");
}

// In order of address: as parts of one buffer are.
bool is_ascending(std::span<const Buffer> buffers) {
  const std::byte* end = nullptr;
  for (const Buffer& buffer : buffers) {
    if (buffer.count == 0) continue;
    if (buffer.begin() < end) return false;
    end = end_of(buffer);
  }
  return true;
}

void check_outputs(const char* operation, std::span<const Buffer> outputs) {
  if (is_ascending(outputs)) return;
  std::vector<const Buffer*> sorted;
  for (const Buffer& output : outputs)
    if (output.count != 0) sorted.push_back(&output);
  std::ranges::sort(sorted, {}, [](const Buffer* buffer) { return buffer->begin(); });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (!share(*sorted[i - 1], *sorted[i])) continue;
    const auto [first, second] = std::minmax({sorted[i - 1] - outputs.data(), sorted[i] - outputs.data()});
    refuse(operation, place("output", static_cast<std::size_t>(first), 0),
           place("output", static_cast<std::size_t>(second), 0), true);
  }
}

}  // namespace

void check_apart(const char* operation, std::span<const Buffer> outputs, std::size_t own_output,
                 std::span<const Buffer> inputs, std::size_t own_input) {
  check_outputs(operation, outputs);
  const std::byte* first = nullptr;  // what all outputs span
  const std::byte* last = nullptr;
  for (const Buffer& output : outputs) {
    if (output.count == 0) continue;
    if (!first || output.begin() < first) first = output.begin();
    last = std::max<const std::byte*>(last, end_of(output));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].count == 0 || inputs[i].begin() >= last || end_of(inputs[i]) <= first) continue;
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (!share(outputs[o], inputs[i])) continue;
      if (o == own_output && i == own_input && outputs[o].data == inputs[i].data) continue;
      refuse(operation, place("output", o, outputs.size()), place("input", i, inputs.size()), false);
    }
  }
}

}  // namespace holmes
