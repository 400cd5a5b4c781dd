// The flight recorder: what it keeps, that readers may look at any time, and what it tells of communicators that work,
// wait and fail. Prints what recording costs.
#include <atomic>
#include <cstdio>
#include <ctime>

#include "holmes/core/error.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/json_writer.hpp"
#include "holmes/record/registry.hpp"
#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

RecordedCall all_reduce_of(std::uint64_t sequence, std::uint64_t count) {
  return {.op = OpCode::all_reduce,
          .dtype = DType::float32,
          .reduction = ReduceOp::sum,
          .sequence = sequence,
          .count = count};
}

void check_ring() {
  constexpr std::size_t capacity = 8;
  FlightRecorder recorder(capacity);
  CHECK(recorder.operations().empty());
  const auto now = Clock::now();
  for (std::uint64_t i = 0; i < 3 * capacity; ++i) {
    const std::uint64_t number = recorder.add(all_reduce_of(i, 100), WorkState::queued, now);
    CHECK(number == i + 1);
    recorder.start(number, now + std::chrono::nanoseconds(1));
    if (i % 2 == 0) recorder.finish(number, i % 4 == 0, now + std::chrono::nanoseconds(5));
  }
  // One that is not kept any more, and one that is final already: nothing changes.
  recorder.finish(1, true, now);
  recorder.finish(3 * capacity - 1, false, now);
  const auto kept = recorder.operations();
  CHECK(kept.size() == capacity);
  for (std::size_t i = 0; i < capacity; ++i) {
    const RecordedOperation& operation = kept[i];
    CHECK(operation.number == 2 * capacity + i + 1);
    CHECK(operation.call.sequence == 2 * capacity + i && operation.call.count == 100);
    CHECK(operation.call.op == OpCode::all_reduce && operation.call.reduction == ReduceOp::sum);
    CHECK(!operation.call.root && !operation.call.peer && operation.queued == now);
    const WorkState expected = i % 4 == 0 ? WorkState::completed : i % 4 == 2 ? WorkState::failed : WorkState::running;
    CHECK(operation.state == expected);
    CHECK(operation.finished.has_value() == (i % 2 == 0));
  }
  const auto totals = recorder.totals()[static_cast<std::size_t>(OpCode::all_reduce)];
  CHECK(totals.completed == 6 && totals.failed == 6 && totals.bytes == 6 * 400 && totals.ns == 6 * 5);

  const std::uint64_t number =
      recorder.add({.op = OpCode::recv, .dtype = DType::int8, .peer = 3, .sequence = 7, .tag = 0xfffffffe, .count = 9},
                   WorkState::running, now);
  const RecordedOperation message = recorder.operations().back();
  CHECK(message.number == number && message.call.peer == 3 && message.call.tag == 0xfffffffe);
  CHECK(message.call.sequence == 7 && message.state == WorkState::running && message.started == now);

  FlightRecorder off(0);
  CHECK(off.add(all_reduce_of(0, 1), WorkState::queued, now) == 0);
  off.start(0, now);
  off.finish(0, true, now);
  CHECK(!off.is_on() && off.operations().empty());
}

// Readers never see half of one operation and half of another.
void check_readers() {
  FlightRecorder recorder(16);
  std::atomic<bool> is_over{false};
  std::atomic<std::size_t> seen{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader)
    readers.emplace_back([&] {
      while (!is_over) {
        std::uint64_t last = 0;
        for (const RecordedOperation& operation : recorder.operations()) {
          CHECK(operation.number > last);
          last = operation.number;
          CHECK(operation.call.sequence == operation.number && operation.call.count == 3 * operation.number);
          ++seen;
        }
        std::this_thread::yield();
      }
    });
  const auto now = Clock::now();
  for (std::uint64_t i = 1; i <= 200'000 || seen == 0; ++i) {
    const std::uint64_t number = recorder.add(all_reduce_of(i, 3 * i), WorkState::queued, now);
    recorder.start(number, now);
    if (i % 3) recorder.finish(number, true, now);
  }
  is_over = true;
  for (auto& reader : readers) reader.join();
}

// Records of communicators are taken while their ranks work.
void check_communicators() {
  run_communicators(3, Transport::tcp, [](Communicator& comm) {
    std::atomic<bool> is_over{false};
    std::thread reader([&] {
      while (!is_over) {
        const CommunicatorRecord record = comm.flight_record().front();
        CHECK(record.rank == comm.rank() && record.size == 3 && record.id != 0 && record.ranks.size() == 3);
        (void)collect_metrics();
      }
    });
    std::vector<float> data(300);
    for (int round = 0; round < 300; ++round) {
      const auto work = comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum, {.timeout = {}, .async = true});
      comm.barrier()->wait();
      work->wait();
    }
    is_over = true;
    reader.join();
    const CommunicatorRecord record = comm.flight_record().front();
    CHECK(record.entered == 601 && record.operations.size() == 256);
    CHECK(record.operations.back().call.sequence == 600 && record.operations.back().state == WorkState::completed);
    CHECK(record.state && record.state->pending.empty() && !record.failure);
    comm.barrier()->wait();
  });
}

// A rank waits in a call, and another one has not come: who, how many bytes, and that a thread is blocked by it.
void check_waiting() {
  run_communicators(2, Transport::tcp, [](Communicator& comm) {
    std::vector<float> data(1000);
    if (comm.rank() == 1) {
      comm.recv(buffer(data, DType::float32), 0, 3)->wait();  // until the other one has looked at itself
      comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait();
      return;
    }
    std::thread waiting([&] { comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait(); });
    CommunicatorRecord record;
    do {
      record = comm.flight_record().front();
      CHECK(record.state);
    } while (record.state->pending.empty() || record.state->pending[0].peers.empty());
    const PendingOperation& pending = record.state->pending[0];
    CHECK(pending.call.op == OpCode::all_reduce && pending.call.sequence == 1 && pending.call.count == 1000);
    CHECK(pending.is_running && pending.is_awaited && record.entered == 2);
    CHECK(pending.peers.size() == 1 && pending.peers[0].peer == 1 && !pending.peers[0].is_heard);
    CHECK(pending.peers[0].to_receive_bytes > 0 && pending.peers[0].received_bytes == 0);
    std::vector<float> message(1000);
    comm.send(buffer(message, DType::float32), 1, 3)->wait();
    waiting.join();
    CHECK(comm.flight_record().front().state->messages[1].sent == 1);
  });
}

void check_failure() {
  run_communicators(2, Transport::tcp, [](Communicator& comm) {
    std::vector<float> data(comm.rank() == 0 ? 10 : 11);
    try {
      comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait();
      CHECK(!"the counts differ");
    } catch (const MismatchError&) {
    }
    const CommunicatorRecord record = comm.flight_record().front();
    CHECK(record.failure && record.failure->kind == ErrorKind::mismatch);
    CHECK(record.operations.back().state == WorkState::failed && record.operations.back().call.count == data.size());
    CHECK(record.state && record.state->pending.size() == 1);
  });
  // The communicators are gone, their record and numbers are not.
  const std::string json = process_record_json("test", std::chrono::seconds(1), std::chrono::milliseconds(1));
  CHECK(json.find("\"error\":\"MismatchError\"") != std::string::npos);
  Metrics metrics = collect_metrics();
  for (const auto start = Clock::now(); !metrics.communicators.empty(); metrics = collect_metrics())
    CHECK(Clock::now() - start < std::chrono::seconds(10));  // the I/O thread lets go of them a little later
  CHECK(metrics.failures.at({"test", "MismatchError"}) == 2);
  CHECK(metrics.operations.at({"test", OpCode::all_reduce}).failed == 2);
  CHECK(metrics.operations.at({"test", OpCode::barrier}).completed > 0);
  CHECK(metrics.nics.at({"test", "lo", false}).sent_bytes > 1000);
}

// Groups without end, each with a name of its own: nothing is lost from the totals, and little is kept.
void check_many_groups() {
  constexpr std::uint64_t groups = 2000;
  for (std::uint64_t i = 0; i < groups; ++i) {
    CommunicatorMetrics ended{.name = "group " + std::to_string(i), .connections = {}};
    ended.operations[static_cast<std::size_t>(OpCode::scatter)] = {.completed = 1, .failed = 2, .bytes = 3, .ns = 4};
    keep_after_end(ended, std::nullopt);
    count_failure(ended.name, ErrorKind::timeout);
  }
  const Metrics metrics = collect_metrics();
  OperationTotals total;
  for (const auto& [key, one] : metrics.operations) {
    if (key.second != OpCode::scatter) continue;
    total.completed += one.completed;
    total.ns += one.ns;
  }
  CHECK(total.completed == groups && total.ns == 4 * groups);
  CHECK(metrics.operations.size() < 300 && metrics.failures.size() < 300);
  CHECK(metrics.operations.at({older_groups, OpCode::scatter}).failed > 2 * (groups - 300));
  CHECK(metrics.operations.contains({"group 1999", OpCode::scatter}));
}

void check_json() {
  JsonWriter json;
  json.begin_object().field("a\"b", "c\\\n\xc3").field("n", std::optional<int>{}).field("d", 0.5).key("list");
  json.begin_array().value(1).value(true).begin_object().end_object().end_array().end_object();
  CHECK(json.text() == R"({"a\"b":"c\\\u000a\u00c3","n":null,"d":0.500000000,"list":[1,true,{}]})");
}

double processor_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

void print_cost() {
  FlightRecorder recorder(256);
  constexpr std::uint64_t operations = 2'000'000;
  const auto now = Clock::now();
  const double start_ns = processor_ns();
  for (std::uint64_t i = 0; i < operations; ++i)
    recorder.finish(recorder.add(all_reduce_of(i, 256), WorkState::running, now), true, now);
  const double took_ns = processor_ns() - start_ns;
  std::printf("recording one operation costs %.1f ns\n", took_ns / static_cast<double>(operations));
}

}  // namespace

int main() {
  check_ring();
  check_readers();
  check_many_groups();
  check_json();
  check_communicators();
  check_waiting();
  check_failure();
  print_cost();
  return 0;
}
