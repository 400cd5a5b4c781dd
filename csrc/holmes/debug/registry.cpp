#include "holmes/debug/registry.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>

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

}  // namespace

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

std::vector<CommunicatorRecord> collect_records(Clock::time_point until) {
  const auto sources = alive_sources();
  for (const auto& source : sources) source->request_state();
  std::vector<CommunicatorRecord> records;
  {
    Registry& own = registry();
    std::lock_guard lock(own.mutex);
    records.assign(own.failed.begin(), own.failed.end());
  }
  for (const auto& source : sources) records.push_back(source->record(until));
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
