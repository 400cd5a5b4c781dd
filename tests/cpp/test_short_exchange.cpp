// Calls of few bytes, which run whole in the calling thread (ShortCall, ShortMessage), over shared memory and sockets:
// beside everything else that may come before, between and after them.
#include <atomic>
#include <random>
#include <thread>

#include "collective_checks.hpp"
#include "holmes/comm/host_communicator.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

// Short and long, some at once, on ranks that are late by turns: longer than they poll, or sleep.
void any_order(Transport transport, int size, unsigned seed, int rounds) {
  run_communicators(size, transport, [&](Communicator& comm) {
    std::mt19937 shared(seed);
    std::mt19937 own(seed * 100 + static_cast<unsigned>(comm.rank()));
    constexpr std::size_t counts[] = {0, 1, 3, 100, 256, 257, 5000};
    for (int i = 0; i < rounds; ++i) {
      const auto kind = shared() % 9;
      const std::size_t count = counts[shared() % std::size(counts)];
      const int root = static_cast<int>(shared() % static_cast<unsigned>(size));
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 2000));
      if (kind == 0) check_all_reduce(comm, count);
      if (kind == 1) check_all_gather(comm, count);
      if (kind == 2) check_reduce_scatter(comm, count);
      if (kind == 3) check_all_to_all(comm, count);
      if (kind == 4) check_rooted(comm, count, root);
      if (kind == 5) check_async(comm, count);
      if (kind == 6) comm.barrier()->wait();
      if (kind >= 7) {
        check_p2p(comm, count);
        comm.barrier()->wait();  // it takes messages from anyone, and not those of the next one
      }
    }
  });
}

// Odd sizes, so that nothing in the rings stays aligned, and often around them.
void bytes_around_the_rings(Transport transport) {
  run_communicators(2, transport, [](Communicator& comm) {
    const int peer = 1 - comm.rank();
    std::vector<unsigned char> sent(2048), received(2048);
    for (std::size_t round = 0; round < 4000; ++round) {
      const std::size_t count = (round * 331 + 7) % 2048;
      const auto value = [&](int rank, std::size_t i) {
        return static_cast<unsigned char>(round * 7 + i * 3 + static_cast<std::size_t>(rank));
      };
      for (std::size_t i = 0; i < count; ++i) sent[i] = value(comm.rank(), i);
      const Buffer out{sent.data(), count, DType::uint8, nullptr}, in{received.data(), count, DType::uint8, nullptr};
      for (const WorkPtr& work : comm.batch({{false, in, peer, 1}, {true, out, peer, 1}}, {})) work->wait();
      for (std::size_t i = 0; i < count; ++i) CHECK(received[i] == value(peer, i));
      comm.all_reduce(out, ReduceOp::max)->wait();
      for (std::size_t i = 0; i < count; ++i) CHECK(sent[i] == std::max(value(0, i), value(1, i)));
    }
  });
}

// More than the ring or the sockets hold, with nobody there to take it.
void sends_fill_the_ring(Transport transport) {
  const int messages = transport == Transport::shm ? 4000 : 30000;
  std::atomic<int> sent = 0;
  run_communicators(2, transport, [&](Communicator& comm) {
    std::vector<std::int64_t> data;
    const auto size = [](int i) { return static_cast<std::size_t>(100 + i % 157); };
    if (comm.rank() == 0) {
      for (int i = 0; i < messages; ++i) {
        data.assign(size(i), i);
        comm.send(buffer(data, DType::int64), 1, 5)->wait();
        ++sent;
      }
    } else {
      std::this_thread::sleep_for(100ms);
      CHECK(sent > 0 && sent < messages);
      for (int i = 0; i < messages; ++i) {
        data.assign(size(i), -1);
        const WorkPtr work = comm.recv(buffer(data, DType::int64), 0, 5);
        work->wait();
        CHECK(work->source_rank() == 0);
        CHECK(data == std::vector<std::int64_t>(size(i), i));
      }
    }
  });
}

// Messages match by tag whatever way each went: short ones, long ones, those that came before their receive.
void messages_match(Transport transport) {
  run_communicators(2, transport, [](Communicator& comm) {
    CallOptions async;
    async.async = true;
    std::vector<std::int64_t> one(1), many(20000, 7), other(1);
    if (comm.rank() == 0) {
      for (int round = 0; round < 200; ++round) {
        one[0] = round;
        comm.send(buffer(one, DType::int64), 1, 1)->wait();
        comm.send(buffer(many, DType::int64), 1, 2)->wait();
        one[0] = -round;
        comm.send(buffer(one, DType::int64), 1, 3)->wait();
      }
    } else {
      for (int round = 0; round < 200; ++round) {
        const auto take = [&](std::uint32_t tag) {
          if (tag == 2) {
            many.assign(20000, 0);
            comm.recv(buffer(many, DType::int64), 0, 2)->wait();
            CHECK(many == std::vector<std::int64_t>(20000, 7));
          } else {
            comm.recv(buffer(one, DType::int64), 0, tag)->wait();
            CHECK(one[0] == (tag == 1 ? round : -round));
          }
        };
        const WorkPtr posted = round % 3 == 0 ? comm.recv_any(buffer(other, DType::int64), 3, async) : nullptr;
        if (round % 2 == 0)
          take(1), take(2);
        else
          take(2), take(1);
        if (!posted)
          take(3);
        else
          posted->wait();
        CHECK(!posted || (other[0] == -round && posted->source_rank() == 0));
      }
    }
    comm.barrier()->wait();
  });
}

// Two threads of a rank at one communicator: one calls collectives, the other exchanges messages.
void two_threads(Transport transport) {
  run_communicators(2, transport, [](Communicator& comm) {
    const int peer = 1 - comm.rank();
    std::thread messages([&] {
      std::int64_t out = 0, in = -1;
      for (int i = 0; i < 3000; ++i) {
        out = i;
        const Buffer sent{&out, 1, DType::int64, nullptr}, received{&in, 1, DType::int64, nullptr};
        for (const WorkPtr& work : comm.batch({{true, sent, peer, 1}, {false, received, peer, 1}}, {})) work->wait();
        CHECK(in == i);
      }
    });
    for (int i = 0; i < 3000; ++i) {
      std::int64_t data = i + comm.rank();
      comm.all_reduce({&data, 1, DType::int64, nullptr}, ReduceOp::sum)->wait();
      CHECK(data == 2 * i + 1);
    }
    messages.join();
  });
}

// What one rank calls otherwise is told to all, in the words of every collective.
void disagreement(Transport transport, const std::function<void(Communicator&)>& right,
                  const std::function<void(Communicator&)>& wrong) {
  std::atomic<int> told = 0;
  run_communicators(3, transport, [&](Communicator& comm) {
    try {
      comm.barrier()->wait();
      (comm.rank() == 1 ? wrong : right)(comm);
      comm.barrier()->wait();
    } catch (const MismatchError& error) {
      if (contains(error.what(), "called")) ++told;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", comm.rank(), error.what());
    }
  });
  CHECK(told == 3);
}

void disagreements(Transport transport) {
  const auto reduce_all = [](std::size_t count, DType dtype, ReduceOp op) {
    return [=](Communicator& comm) {
      std::vector<std::int64_t> data(64);
      comm.all_reduce({data.data(), count, dtype, nullptr}, op)->wait();
    };
  };
  const auto right = reduce_all(4, DType::int64, ReduceOp::sum);
  disagreement(transport, right, reduce_all(5, DType::int64, ReduceOp::sum));
  disagreement(transport, right, reduce_all(3, DType::int64, ReduceOp::sum));
  disagreement(transport, right, reduce_all(4, DType::float64, ReduceOp::sum));
  disagreement(transport, right, reduce_all(4, DType::int64, ReduceOp::max));
  disagreement(transport, right, [](Communicator& comm) { comm.barrier()->wait(); });
  const auto send_all = [](int root) {
    return [=](Communicator& comm) {
      std::int64_t data = 1;
      comm.broadcast({&data, 1, DType::int64, nullptr}, root)->wait();
    };
  };
  disagreement(transport, send_all(0), send_all(2));
}

// Who is missing is named at the deadline, who leaves at once.
void missing(Transport transport) {
  std::atomic<bool> is_over = false;
  run_communicators(
      3, transport,
      [&](Communicator& comm) {
        if (comm.rank() == 2) {
          while (!is_over) std::this_thread::sleep_for(1ms);
          return;
        }
        std::string message;
        try {
          comm.barrier()->wait();
        } catch (const HolmesError& error) {
          message = error.what();
        }
        is_over = true;
        CHECK(contains(message, "rank 2"));
      },
      1, 1s);
  run_communicators(2, transport, [](Communicator& comm) {
    std::int64_t data = 0;
    if (comm.rank() == 1) return;
    std::string message;
    try {
      comm.recv({&data, 1, DType::int64, nullptr}, 1, 0)->wait();
    } catch (const HolmesError& error) {
      message = error.what();
    }
    CHECK(contains(message, "rank 1"));
  });
}

// Another thread's abort ends a rank that polls.
void aborted(Transport transport) {
  run_communicators(2, transport, [](Communicator& comm) {
    std::thread other([&] {
      std::this_thread::sleep_for(20ms);
      if (comm.rank() == 0) comm.abort("the test said so");
    });
    std::string message;
    try {
      for (std::int64_t data = 0;;) comm.all_reduce({&data, 1, DType::int64, nullptr}, ReduceOp::sum)->wait();
    } catch (const AbortedError& error) {
      message = error.what();
    }
    other.join();
    CHECK(contains(message, "the test said so"));
  });
}

// The flight recorder tells of each, in order.
void recorded(Transport transport) {
  run_communicators(2, transport, [](Communicator& comm) {
    const int peer = 1 - comm.rank();
    std::int64_t out = 1, in = 0;
    for (int i = 0; i < 10; ++i) {
      if (comm.rank() == 0 && i % 3 == 0) std::this_thread::sleep_for(2ms);
      comm.all_reduce({&out, 1, DType::int64, nullptr}, ReduceOp::max)->wait();
      if (comm.rank() == 0)
        comm.send({&out, 1, DType::int64, nullptr}, peer, 9)->wait();
      else
        comm.recv({&in, 1, DType::int64, nullptr}, peer, 9)->wait();
    }
    std::uint64_t collectives = 0, messages = 0;
    const std::vector<CommunicatorRecord> record = comm.flight_record();
    for (const RecordedOperation& operation : record.front().operations) {
      CHECK(operation.state == WorkState::completed && operation.finished && operation.started);
      CHECK(operation.queued <= *operation.started && *operation.started <= *operation.finished);
      if (operation.call.op == OpCode::all_reduce) CHECK(operation.call.sequence == 1 + collectives++);
      if (!operation.call.is_collective()) {
        CHECK(operation.call.sequence == messages++ && operation.call.tag == 9 && operation.call.peer == peer);
        CHECK(operation.call.count == 1 && operation.call.dtype == DType::int64);
      }
    }
    CHECK(collectives == 10 && messages == 10);
  });
}

}  // namespace

int main() {
  for (const Transport transport : {Transport::shm, Transport::tcp}) {
    for (const int size : {2, 3, 4, 5, 8}) any_order(transport, size, static_cast<unsigned>(size), 300 / size);
    bytes_around_the_rings(transport);
    sends_fill_the_ring(transport);
    messages_match(transport);
    two_threads(transport);
    disagreements(transport);
    missing(transport);
    aborted(transport);
    recorded(transport);
  }
  std::printf("short_exchange: all checks passed\n");
}
