#include "holmes/record/registry.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>

#include "holmes/core/fork.hpp"

namespace holmes {
namespace {

constexpr double ns_per_s = 1e9;
constexpr std::size_t kept_failures = 16;
// A long job may make any number of groups, each with a new name.
constexpr std::size_t kept_groups = 256;

struct Registry {
  std::uint64_t epoch = fork_epoch();
  std::mutex mutex;
  std::vector<std::weak_ptr<RecordSource>> sources;
  std::deque<CommunicatorRecord> failed;
  Metrics ended;
  std::deque<std::string> ended_groups;  // names in `ended`, in the order in which they came
};

Registry& registry() { return own_of_process<Registry>(); }

std::vector<std::shared_ptr<RecordSource>> alive_sources() {
  Registry& own = registry();
  std::vector<std::shared_ptr<RecordSource>> alive;
  std::lock_guard lock(own.mutex);
  std::erase_if(own.sources, [](const auto& source) { return source.expired(); });
  for (const auto& source : own.sources)
    if (auto one = source.lock()) alive.push_back(std::move(one));
  return alive;
}

void operator+=(OperationTotals& to, const OperationTotals& from) {
  to.completed += from.completed;
  to.failed += from.failed;
  to.bytes += from.bytes;
  to.ns += from.ns;
}

void add(Metrics& all, const CommunicatorMetrics& one, bool is_alive) {
  for (const auto& [key, totals] : totals_by_path(one.connections, is_alive))
    all.nics[{one.name, key.first, key.second}] += totals;
  for (std::size_t op = 0; op < op_code_count; ++op) {
    const OperationTotals& from = one.operations[op];
    if (from.completed + from.failed == 0) continue;
    all.operations[{one.name, static_cast<OpCode>(op)}] += from;
  }
  if (!is_alive || one.name.empty()) return;
  ++all.communicators[one.name];
  if (!one.waiting) return;
  const auto [place, is_first] = all.waiting.emplace(one.name, *one.waiting);
  if (!is_first && one.waiting->queued < place->second.queued) place->second = *one.waiting;
}

// Moves what `counts`, by group and more, has of `group` to the older groups.
template <typename Counts>
void fold(Counts& counts, const std::string& group) {
  typename Counts::key_type first{};
  std::get<0>(first) = group;
  auto at = counts.lower_bound(first);
  while (at != counts.end() && std::get<0>(at->first) == group) {
    auto key = at->first;
    std::get<0>(key) = older_groups;
    counts[key] += at->second;
    at = counts.erase(at);
  }
}

// Room for another ended group, of this name.
void make_room(Registry& own, const std::string& group) {
  if (std::ranges::find(own.ended_groups, group) != own.ended_groups.end()) return;
  own.ended_groups.push_back(group);
  if (own.ended_groups.size() <= kept_groups) return;
  fold(own.ended.nics, own.ended_groups.front());
  fold(own.ended.operations, own.ended_groups.front());
  fold(own.ended.failures, own.ended_groups.front());
  own.ended_groups.pop_front();
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
  make_room(own, metrics.name);
  add(own.ended, metrics, false);
  if (!failed) return;
  own.failed.push_back(std::move(*failed));
  if (own.failed.size() > kept_failures) own.failed.pop_front();
}

void count_failure(const std::string& communicator, ErrorKind kind) {
  Registry& own = registry();
  std::lock_guard lock(own.mutex);
  make_room(own, communicator);
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

void append_json(JsonWriter& json, const Metrics& metrics) {
  json.begin_object().key("nics").begin_array();
  for (const auto& [key, totals] : metrics.nics) {
    json.begin_object().field("group", std::get<0>(key));
    append_totals(json, std::get<1>(key), std::get<2>(key), totals);
    json.end_object();
  }
  json.end_array().key("operations").begin_array();
  for (const auto& [key, totals] : metrics.operations)
    json.begin_object()
        .field("group", key.first)
        .field("op", name(key.second))
        .field("completed", totals.completed)
        .field("failed", totals.failed)
        .field("bytes", totals.bytes)
        .field("seconds", static_cast<double>(totals.ns) / ns_per_s)
        .end_object();
  json.end_array().key("failures").begin_array();
  for (const auto& [key, count] : metrics.failures)
    json.begin_object().field("group", key.first).field("error", key.second).field("count", count).end_object();
  json.end_array().key("communicators").begin_object();
  for (const auto& [group, count] : metrics.communicators) json.field(group, count);
  json.end_object().key("waits").begin_array();
  for (const auto& [group, operation] : metrics.waiting)
    json.begin_object()
        .field("group", group)
        .field("op", name(operation.call.op))
        .field("sequence", operation.call.sequence)
        .field("seconds", std::chrono::duration<double>(Clock::now() - operation.queued).count())
        .end_object();
  json.end_array().end_object();
}

}  // namespace holmes
