#include "holmes/record/communicator_record.hpp"

#include <algorithm>

namespace holmes {
namespace {

double seconds(Clock::time_point time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); }

std::optional<double> seconds(const std::optional<Clock::time_point>& time) {
  return time ? std::optional(seconds(*time)) : std::nullopt;
}

// Into an object that is open.
void append_call(JsonWriter& json, const RecordedCall& call) {
  json.field("op", name(call.op)).field("collective", call.is_collective()).field("sequence", call.sequence);
  json.field("dtype", name(call.dtype)).field("count", call.count).field("bytes", call.count * size_bytes(call.dtype));
  json.key("reduction");
  if (call.reduction) {
    json.value(name(*call.reduction));
  } else {
    json.raw("null");
  }
  json.field("root", call.root).field("peer", call.peer).field("tag", call.tag);
}

void append_failure(JsonWriter& json, const Failure& failure) {
  json.begin_object().field("error", name(failure.kind)).field("message", failure.message);
  json.field("rank", failure.context.rank).field("peer", failure.context.peer);
  json.field("host", failure.context.host).field("nic", failure.context.nic).end_object();
}

void append_pending(JsonWriter& json, const PendingOperation& operation) {
  json.begin_object().field("number", operation.number);
  append_call(json, operation.call);
  json.field("running", operation.is_running).field("awaited", operation.is_awaited);
  json.field("queued_s", seconds(operation.queued));
  json.key("peers").begin_array();
  for (const PeerProgress& peer : operation.peers) {
    json.begin_object().field("peer", peer.peer).field("heard", peer.is_heard);
    json.field("received_bytes", peer.received_bytes).field("to_receive_bytes", peer.to_receive_bytes);
    json.field("sent_bytes", peer.sent_bytes).field("to_send_bytes", peer.to_send_bytes);
    json.field("moving", peer.is_moving).end_object();
  }
  json.end_array().end_object();
}

void append_state(JsonWriter& json, const DriverState& state) {
  json.begin_object().field("taken_s", seconds(state.taken)).field("pending_count", state.pending_count);
  json.key("pending").begin_array();
  for (const PendingOperation& operation : state.pending) append_pending(json, operation);
  json.end_array().key("messages").begin_array();
  for (const PeerMessages& peer : state.messages)
    json.begin_object()
        .field("sent", peer.sent)
        .field("arrived", peer.arrived)
        .field("lost", peer.is_lost)
        .end_object();
  json.end_array().end_object();
}

double seconds_of_us(std::uint64_t us) { return static_cast<double>(us) * 1e-6; }

}  // namespace

void operator+=(NicTotals& to, const NicTotals& from) {
  to.sent_bytes += from.sent_bytes;
  to.received_bytes += from.received_bytes;
  to.retransmitted_segments += from.retransmitted_segments;
  to.resent_chunks += from.resent_chunks;
  to.connections += from.connections;
  to.round_trip_us = std::max(to.round_trip_us, from.round_trip_us);
  to.path_changes += from.path_changes;
  to.busy_us += from.busy_us;
  to.receiver_limited_us += from.receiver_limited_us;
  to.buffer_limited_us += from.buffer_limited_us;
  to.stalls += from.stalls;
  to.stalled_us += from.stalled_us;
}

std::map<PathKey, NicTotals> totals_by_path(const std::vector<ConnectionInfo>& connections, bool is_alive) {
  std::map<PathKey, NicTotals> all;
  for (const ConnectionInfo& info : connections) {
    const bool is_open = is_alive && !info.is_retired;
    NicTotals& totals = all[{info.transport == "shm" ? "shm" : info.interface, info.is_between}];
    const std::uint64_t changes = std::max(totals.path_changes, info.path_changes);  // of one path all see the same
    totals += {.sent_bytes = info.sent_bytes,
               .received_bytes = info.received_bytes,
               .retransmitted_segments = info.retransmitted_segments,
               .resent_chunks = info.resent_chunks,
               .connections = is_open ? 1U : 0U,
               .round_trip_us = is_open ? info.round_trip_us : 0,
               .busy_us = info.busy_us,
               .receiver_limited_us = info.receiver_limited_us,
               .buffer_limited_us = info.buffer_limited_us,
               .stalls = info.stalls,
               .stalled_us = info.stalled_us};
    totals.path_changes = changes;
  }
  return all;
}

void append_totals(JsonWriter& json, const std::string& interface, bool is_between, const NicTotals& totals) {
  json.field("nic", interface).field("path", is_between ? "inter" : "intra");
  json.field("sent_bytes", totals.sent_bytes).field("received_bytes", totals.received_bytes);
  json.field("retransmitted_segments", totals.retransmitted_segments).field("resent_chunks", totals.resent_chunks);
  json.field("connections", totals.connections).field("round_trip_s", seconds_of_us(totals.round_trip_us));
  json.field("path_changes", totals.path_changes).field("busy_s", seconds_of_us(totals.busy_us));
  json.field("receiver_limited_s", seconds_of_us(totals.receiver_limited_us));
  json.field("buffer_limited_s", seconds_of_us(totals.buffer_limited_us));
  json.field("stalls", totals.stalls).field("stalled_s", seconds_of_us(totals.stalled_us));
}

void append_json(JsonWriter& json, const CommunicatorRecord& record) {
  json.begin_object().field("name", record.name).field("id", std::to_string(record.id));
  json.field("backend", record.backend).field("rank", record.rank).field("size", record.size);
  json.field("entered", record.entered);
  json.key("failure");
  if (record.failure) {
    append_failure(json, *record.failure);
  } else {
    json.raw("null");
  }
  json.key("ranks").begin_array();
  for (const PeerIdentity& rank : record.ranks)
    json.begin_object()
        .field("host", rank.host)
        .field("nic", rank.nic)
        .field("pid", rank.pid)
        .field("job_rank", rank.job_rank)
        .end_object();
  json.end_array().key("state");
  if (record.state) {
    append_state(json, *record.state);
  } else {
    json.raw("null");
  }
  json.key("operations").begin_array();
  for (const RecordedOperation& operation : record.operations) {
    json.begin_object().field("number", operation.number);
    append_call(json, operation.call);
    json.field("state", name(operation.state)).field("queued_s", seconds(operation.queued));
    json.field("started_s", seconds(operation.started)).field("finished_s", seconds(operation.finished)).end_object();
  }
  json.end_array().key("nics").begin_array();
  for (const auto& [key, totals] : record.nics) {
    json.begin_object();
    append_totals(json, key.first, key.second, totals);
    json.end_object();
  }
  json.end_array().end_object();
}

}  // namespace holmes
