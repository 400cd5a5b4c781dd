// The communicators of this process, for the flight record and for metrics.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "holmes/record/communicator_record.hpp"

namespace holmes {

// Whether a communicator of this name only serves one on NCCL, which tells for both.
bool is_internal(const std::string& communicator);
// From now on it is part of the process's record and metrics, until it is destroyed. Thread-safe, as all here.
void register_source(const std::weak_ptr<RecordSource>& source);
// What remains of a communicator that is being destroyed: its metrics, and its record where it failed (the last few of
// them are kept).
void keep_after_end(const CommunicatorMetrics& metrics, std::optional<CommunicatorRecord> failed);
// A communicator failed; for metrics.
void count_failure(const std::string& communicator, ErrorKind kind);

// All communicators that are alive, and those that failed. Waits for the drivers' answers for `patience`. Where bytes
// are missing, it looks again after `settle` and tells what has moved; zero: it does not.
std::vector<CommunicatorRecord> collect_records(Duration patience, Duration settle);

// A group, and of its connections those of one kind, as in PathKey.
using NicKey = std::tuple<std::string, std::string, bool>;

// What ended groups count together that are no longer kept one by one.
inline constexpr const char* older_groups = "(older groups)";

// Since the process began, ended communicators included. A group is a communicator's name; of those that ended the last
// 256 are kept, and the others together as `older_groups`.
struct Metrics {
  std::map<NicKey, NicTotals> nics;
  std::map<std::pair<std::string, OpCode>, OperationTotals> operations;   // by group and operation
  std::map<std::pair<std::string, std::string>, std::uint64_t> failures;  // by group and kind of error
  std::map<std::string, std::uint64_t> communicators;                     // alive ones, by group
  std::map<std::string, RecordedOperation> waiting;                       // the oldest that has not ended, by group
};
Metrics collect_metrics();

// Lists of objects, by group and NIC, operation or error; what has not ended with the seconds since its call.
void append_json(JsonWriter& json, const Metrics& metrics);

}  // namespace holmes
