#include "holmes/debug/registry.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>

#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

constexpr std::size_t kept_failures = 16;

struct Registry {
  std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::vector<std::weak_ptr<RecordSource>> sources;
  std::deque<CommunicatorRecord> failed;
  Metrics ended;
};

// A forked child has none of its parent's communicators, and perhaps a locked mutex: it gets a registry of its own.
// Never destroyed: communicators may outlive static destruction.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* found = current.load();
  if (found && found->epoch == fork_epoch()) return *found;
  Registry* fresh = new Registry();
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

std::vector<std::shared_ptr<RecordSource>> alive_sources() {
  Registry& own = registry();
  std::vector<std::shared_ptr<RecordSource>> alive;
  std::lock_guard lock(own.mutex);
  std::erase_if(own.sources, [](const auto& source) { return source.expired(); });
  for (const auto& source : own.sources)
    if (auto one = source.lock()) alive.push_back(std::move(one));
  return alive;
}

void add(Metrics& all, const CommunicatorMetrics& one, bool is_alive) {
  for (const ConnectionInfo& info : one.connections) {
    NicTotals& totals = all.nics[{one.name, info.transport == "shm" ? "shm" : info.interface}];
    totals.sent_bytes += info.sent_bytes;
    totals.received_bytes += info.received_bytes;
    totals.retransmitted_segments += info.retransmitted_segments;
    totals.resent_chunks += info.resent_chunks;
    totals.connections += is_alive && !info.is_retired;
  }
  for (std::size_t op = 0; op < recorded_op_count; ++op) {
    const OperationTotals& from = one.operations[op];
    if (from.completed + from.failed == 0) continue;
    OperationTotals& to = all.operations[{one.name, static_cast<RecordedOp>(op)}];
    to.completed += from.completed;
    to.failed += from.failed;
    to.bytes += from.bytes;
    to.ns += from.ns;
  }
  if (is_alive) ++all.communicators[one.name];
}

std::vector<CommunicatorRecord> ask(const std::vector<std::shared_ptr<RecordSource>>& sources, Duration patience) {
  const auto until = Clock::now() + patience;
  for (const auto& source : sources) source->request_state();
  std::vector<CommunicatorRecord> records;
  for (const auto& source : sources) records.push_back(source->record(until));
  return records;
}

bool misses_bytes(const CommunicatorRecord& record) {
  return !record.failure && record.state &&
         std::ranges::any_of(record.state->pending, [](const auto& operation) { return !operation.peers.empty(); });
}

bool is_same(const PeerProgress& one, const PeerProgress& other) {
  return one.peer == other.peer && one.is_heard == other.is_heard && one.received_bytes == other.received_bytes &&
         one.sent_bytes == other.sent_bytes;
}

void mark_moving(CommunicatorRecord& record, const CommunicatorRecord& before) {
  if (!record.state || record.failure) return;
  for (PendingOperation& operation : record.state->pending)
    for (PeerProgress& peer : operation.peers)
      peer.is_moving = !before.state || std::ranges::none_of(before.state->pending, [&](const auto& other) {
        return other.number == operation.number &&
               std::ranges::any_of(other.peers, [&](const PeerProgress& was) { return is_same(was, peer); });
      });
}

}  // namespace

bool is_internal(const std::string& communicator) { return communicator.ends_with("/control"); }

void register_source(const std::weak_ptr<RecordSource>& source) {
  Registry& own = registry();
  std::lock_guard lock(own.mutex);
  std::erase_if(own.sources, [](const auto& other) { return other.expired(); });
  own.sources.push_back(source);
}

void keep_after_end(const CommunicatorMetrics& metrics, std::optional<CommunicatorRecord> failed) {
  Registry& own = registry();
  std::lock_guard lock(own.mutex);
  add(own.ended, metrics, false);
  if (!failed) return;
  own.failed.push_back(std::move(*failed));
  if (own.failed.size() > kept_failures) own.failed.pop_front();
}

void count_failure(const std::string& communicator, ErrorKind kind) {
  Registry& own = registry();
  std::lock_guard lock(own.mutex);
  ++own.ended.failures[{communicator, std::string(name(kind))}];
}

std::vector<CommunicatorRecord> collect_records(Duration patience, Duration settle) {
  const auto sources = alive_sources();
  std::vector<CommunicatorRecord> records = ask(sources, patience);
  if (settle > Duration::zero() && std::ranges::any_of(records, misses_bytes)) {
    std::this_thread::sleep_for(settle);
    const std::vector<CommunicatorRecord> before = std::move(records);
    records = ask(sources, patience);
    for (std::size_t i = 0; i < records.size(); ++i) mark_moving(records[i], before[i]);
  }
  Registry& own = registry();
  std::lock_guard lock(own.mutex);
  records.insert(records.begin(), own.failed.begin(), own.failed.end());
  return records;
}

Metrics collect_metrics() {
  const auto sources = alive_sources();
  Metrics all;
  {
    Registry& own = registry();
    std::lock_guard lock(own.mutex);
    all = own.ended;
  }
  for (const auto& source : sources) add(all, source->metrics(), true);
  return all;
}

}  // namespace holmes
