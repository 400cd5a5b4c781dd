// CommunicatorRecord: what one communicator of this process has done and is waiting for, at one moment, as data and as
// JSON.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/connection_info.hpp"
#include "holmes/core/error.hpp"
#include "holmes/record/flight_recorder.hpp"
#include "holmes/record/json_writer.hpp"

namespace holmes {

// A rank of a communicator as a process among others, as it said when the communicator was made.
struct PeerIdentity {
  std::string host;
  std::string nic;  // of this process, towards it; "shm"; empty for this process itself
  std::int64_t pid = 0;
  std::optional<int> job_rank{};  // number of the process in the job, where it has one
};

// What has moved between this rank and `peer` in an operation that is not finished.
struct PeerProgress {
  int peer = 0;
  bool is_heard = false;  // collectives: something of it has arrived, so the peer has begun it
  std::uint64_t received_bytes = 0;
  std::uint64_t to_receive_bytes = 0;  // in total
  std::uint64_t sent_bytes = 0;        // given to the system, which may still hold them
  std::uint64_t to_send_bytes = 0;
  bool is_moving = false;  // these numbers were others a little earlier
};

struct PendingOperation {
  std::uint64_t number = 0;  // in the flight recorder; 0 where that is off
  RecordedCall call;
  bool is_running = false;  // collectives: the first of the queue
  bool is_awaited = false;  // a thread waits for it
  Clock::time_point queued{};
  std::vector<PeerProgress> peers;  // those with whom something is missing; a receive from any rank has none
};

// Messages, of sends and receives.
struct PeerMessages {
  std::uint64_t sent = 0;     // given to the system in whole
  std::uint64_t arrived = 0;  // in whole, also those that no receive has asked for yet
  bool is_lost = false;       // its process ended, or it destroyed its communicator
};

// What only the thread that drives a communicator can see.
struct DriverState {
  Clock::time_point taken{};
  std::vector<PendingOperation> pending;  // at most `max_pending` of them
  std::size_t pending_count = 0;
  std::vector<PeerMessages> messages;  // by rank
};
inline constexpr std::size_t max_pending = 256;

// Of a communicator's connections those over one interface ("shm": shared memory) between clusters, or inside them.
using PathKey = std::pair<std::string, bool>;

// What a communicator's connections of one such kind did.
struct NicTotals {
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t retransmitted_segments = 0;
  std::uint64_t resent_chunks = 0;
  std::uint64_t connections = 0;    // open ones
  std::uint64_t round_trip_us = 0;  // the longest of those
  std::uint64_t path_changes = 0;
  std::uint64_t busy_us = 0;  // as in ConnectionInfo, of all of them added up
  std::uint64_t receiver_limited_us = 0;
  std::uint64_t buffer_limited_us = 0;
  std::uint64_t stalls = 0;
  std::uint64_t stalled_us = 0;
};

void operator+=(NicTotals& to, const NicTotals& from);
std::map<PathKey, NicTotals> totals_by_path(const std::vector<ConnectionInfo>& connections, bool is_alive);
// Into an object that is open.
void append_totals(JsonWriter& json, const std::string& interface, bool is_between, const NicTotals& totals);

struct CommunicatorRecord {
  std::string name;
  std::uint64_t id = 0;  // the same on all ranks, differs from every other communicator's; 0: set-up is not done
  std::string backend;   // "host" or "nccl"
  int rank = 0;
  int size = 1;
  std::uint64_t entered = 0;                  // collectives this rank has called
  std::optional<Failure> failure{};           // what ended it
  std::vector<PeerIdentity> ranks;            // by rank; empty: set-up is not done
  std::optional<DriverState> state{};         // absent: the thread that drives it did not answer in time
  std::vector<RecordedOperation> operations;  // oldest first
  std::map<PathKey, NicTotals> nics;          // empty: not known
};

// What a communicator has done and does, for metrics.
struct CommunicatorMetrics {
  std::string name;  // empty: it does not count yet
  std::vector<ConnectionInfo> connections;
  std::array<OperationTotals, op_code_count> operations{};
  std::optional<RecordedOperation> waiting{};  // the oldest that has not ended
};

// A communicator as the flight record sees it. Thread-safe.
class RecordSource {
public:
  virtual ~RecordSource() = default;
  // Asks the driver for its state; does not wait.
  virtual void request_state() = 0;
  // Waits for the state until `until`.
  virtual CommunicatorRecord record(Clock::time_point until) = 0;
  virtual CommunicatorMetrics metrics() = 0;
};

// As JSON. Times in seconds of the monotonic clock; absent values are null.
void append_json(JsonWriter& json, const CommunicatorRecord& record);

}  // namespace holmes
