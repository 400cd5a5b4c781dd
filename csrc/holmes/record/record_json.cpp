#include "holmes/record/record_json.hpp"

namespace holmes {
namespace {

constexpr double ns_per_s = 1e9;

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

}  // namespace

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
  json.end_array().end_object();
}

void append_json(JsonWriter& json, const Metrics& metrics) {
  json.begin_object().key("nics").begin_array();
  for (const auto& [key, totals] : metrics.nics)
    json.begin_object()
        .field("group", key.first)
        .field("nic", key.second)
        .field("sent_bytes", totals.sent_bytes)
        .field("received_bytes", totals.received_bytes)
        .field("retransmitted_segments", totals.retransmitted_segments)
        .field("resent_chunks", totals.resent_chunks)
        .field("connections", totals.connections)
        .end_object();
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
