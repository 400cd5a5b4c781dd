// Several ports of RDMA as rails of one connection, on the stand-in for libibverbs: what they share, and what comes of
// a port that is lost.
#include <barrier>
#include <cstring>
#include <random>
#include <span>
#include <tuple>

#include "holmes/transport/shared_buffer.hpp"
#include "rdma_checks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// Rank 0 uses fake0, fake2 and so on, rank 1 fake1, fake3, rank 2 as rank 0.
int device_of(int rank, int lane) { return 2 * lane + rank % 2; }

void run_lanes(int size, int lanes, const std::function<void(Communicator&)>& body) {
  const auto store = make_local_store();
  run_ranks(size, [&](int rank) {
    CommunicatorOptions options = options_of(rank, size);
    options.rdma_ports.clear();
    for (int lane = 0; lane < lanes; ++lane)
      options.rdma_ports.push_back("fake" + std::to_string(device_of(rank, lane)) + ":1");
    options.timeout = 40s;
    body(*make_communicator(store, options));
  });
  check_nothing_left();
}

void check_lanes() {
  for (const long delay_us : {0L, 300L}) {
    fake().set("delay_us", delay_us);
    run_lanes(delay_us == 0 ? 3 : 2, 2, [](Communicator& comm) { check_everything(comm); });
    run_lanes(2, 3, check_large_collectives);
  }
  fake().set("delay_us", 0);
}

// What is large goes over all ports, by what they carry. A read of a MiB takes so long that this holds though the
// machine stands still for a tenth of a second now and then; the first of the rounds, in which the rates are not known,
// is not counted. (A port three times as slow would be on the edge: of two reads on their way and a third it is that
// late.)
void check_shares() {
  constexpr int rounds = 5;
  constexpr std::size_t bytes = 8 << 20;
  fake().set("read_us_per_mib", 200000);
  for (const bool is_even : {true, false}) {
    if (!is_even) fake().set("slow_device", device_of(1, 1));
    long before[2];
    std::barrier both(2);
    run_lanes(2, 2, [&](Communicator& comm) {
      Bytes data = comm.rank() == 0 ? message(bytes, 3) : Bytes(bytes);
      for (int round = 0; round < rounds; ++round) {
        both.arrive_and_wait();
        if (comm.rank() == 0 && round == 1)
          for (const int lane : {0, 1}) before[lane] = fake().device_bytes(device_of(1, lane));
        both.arrive_and_wait();
        if (comm.rank() == 0) comm.send(buffer(data, DType::uint8), 1, 0, {})->wait();
        if (comm.rank() == 1) comm.recv(buffer(data, DType::uint8), 0, 0, {})->wait();
      }
      CHECK(data == message(bytes, 3));
      both.arrive_and_wait();
      std::uint64_t moved[2] = {};
      for (const ConnectionInfo& info : comm.connections())
        if (info.purpose == "p2p")
          moved[info.interface.substr(0, 5) == "fake" + std::to_string(device_of(comm.rank(), 1))] +=
              comm.rank() == 0 ? info.sent_bytes : info.received_bytes;
      CHECK(moved[0] + moved[1] >= rounds * bytes && moved[1] >= rounds << 20);
    });
    const long first = fake().device_bytes(device_of(1, 0)) - before[0];
    const long second = fake().device_bytes(device_of(1, 1)) - before[1];
    std::printf("%s ports read %ld and %ld MiB\n", is_even ? "two equal" : "one fast and one slow", first >> 20,
                second >> 20);
    CHECK(first + second == static_cast<long>((rounds - 1) * bytes));
    CHECK(is_even ? second > 0.35 * first && first > 0.35 * second : first > 1.2 * second && second > 0.15 * first);
  }
  fake().set("read_us_per_mib", 0);
  fake().set("heal", 0);
}

// Operations of all kinds and sizes, the same on all ranks by `seed`; every byte is checked.
void work(Communicator& comm, int rounds, unsigned seed) {
  std::mt19937 random(seed);
  const auto own = static_cast<std::size_t>(comm.rank());
  const auto size = static_cast<std::size_t>(comm.size());
  for (int round = 0; round < rounds; ++round) {
    const std::size_t sizes[] = {1, 100, 4000, 70000, 524287, 524288, 1200028, 3000001};
    const std::size_t bytes = sizes[random() % std::size(sizes)];
    const std::size_t number = random() % 1000;
    switch (random() % 5) {
      case 0: {
        // Half of them in memory that is registered anyhow, and sent from there.
        const std::size_t count = bytes / 8 + 1;
        SharedBuffer memory(number % 2 == 0 ? count * 8 : 8);
        std::vector<std::int64_t> other(number % 2 == 0 ? 0 : count);
        const std::span data(number % 2 == 0 ? reinterpret_cast<std::int64_t*>(memory.data()) : other.data(), count);
        for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::int64_t>(i * (own + 1) + number);
        comm.all_reduce({data.data(), count, DType::int64, nullptr}, ReduceOp::sum, {})->wait();
        for (std::size_t i = 0; i < count; ++i)
          CHECK(data[i] == static_cast<std::int64_t>(i * size * (size + 1) / 2 + size * number));
        break;
      }
      case 1: {
        const auto root = number % size;
        SharedBuffer memory(bytes);
        Bytes other(bytes);
        auto* const data = number % 2 == 0 ? reinterpret_cast<std::uint8_t*>(memory.data()) : other.data();
        if (own == root) fill_message(data, bytes, number);
        comm.broadcast({data, bytes, DType::uint8, nullptr}, static_cast<int>(root), {})->wait();
        CHECK(std::memcmp(data, message(bytes, number).data(), bytes) == 0);
        std::memset(data, 0xee, bytes);
        break;
      }
      case 2: {  // one way, more than the queues hold
        const int from = static_cast<int>(number % size);
        const int to = static_cast<int>((number + 1) % size);
        const int count = bytes < 5000 ? 400 : 3;
        for (int i = 0; i < count; ++i) {
          const std::size_t one = number + static_cast<std::size_t>(i);
          Bytes data = comm.rank() == from ? message(bytes, one) : Bytes(bytes);
          if (comm.rank() == from) comm.send(buffer(data, DType::uint8), to, 0, {})->wait();
          if (comm.rank() == to) {
            comm.recv(buffer(data, DType::uint8), from, 0, {})->wait();
            CHECK(data == message(bytes, one));
          }
        }
        break;
      }
      default: {
        const int next = static_cast<int>((own + 1) % size);
        const int before = static_cast<int>((own + size - 1) % size);
        auto sent = std::make_unique<Bytes>(message(bytes, number + own));
        Bytes received(bytes);
        const auto arriving = comm.recv(buffer(received, DType::uint8), before, 1, {.async = true});
        comm.send(buffer(*sent, DType::uint8), next, 1, {})->wait();
        std::ranges::fill(*sent, 0xee);
        sent.reset();
        arriving->wait();
        CHECK(received == message(bytes, number + static_cast<std::size_t>(before)));
      }
    }
  }
}

// A port that is lost at any moment, or a request: nothing is lost, nothing comes twice, and who uses it is told.
void check_lost_lane(unsigned seed) {
  std::mt19937 random(seed);
  const int lanes = 2 + static_cast<int>(random() % 2);
  const int size = random() % 4 == 0 ? 3 : 2;
  const long kind = static_cast<long>(random() % 6);  // 3: a request, 4 and 5: a port that tells so
  const int device = device_of(static_cast<int>(random() % 2), static_cast<int>(random() % 8 == 0 ? 1 : 0));
  const long after = static_cast<long>(random() % (random() % 2 == 0 ? 60 : 1500));
  const bool is_twice = lanes == 3 && random() % 2 == 0;
  fake().set("seed", static_cast<long>(seed));
  fake().set("hostile", 1);
  fake().set("retry_ms", seed % 2 == 0 ? 20 : 1);  // with much of the other direction still on its way
  fake().set("delay_us", random() % 2 == 0 ? 0 : 200);
  if (std::getenv("HOLMES_TEST_RDMA_SEEDS"))
    std::fprintf(stdout, "seed %u: %d ranks, %d ports, kind %ld on fake%d after %ld%s\n", seed, size, lanes, kind,
                 device, after, is_twice ? ", twice" : "");
  std::atomic<bool> is_retired = false;
  const std::string told = told_by([&] {
    std::barrier all(size);
    run_lanes(size, lanes, [&](Communicator& comm) {
      all.arrive_and_wait();
      if (comm.rank() == 0) {
        if (kind == 3) {
          fake().set("fail_after", after);
        } else {
          fake().set("die_device", device);
          fake().set("die_kind", kind < 3 ? kind : kind - 1);
          fake().set("die_after", after);
        }
      }
      all.arrive_and_wait();
      work(comm, 12, seed);
      if (is_twice) {
        all.arrive_and_wait();
        if (comm.rank() == 0) fake().set("fail_after", static_cast<long>(seed % 300));
      }
      work(comm, 12, seed + 1);
      comm.barrier({})->wait();
      for (const ConnectionInfo& info : comm.connections()) is_retired = is_retired || info.is_retired;
    });
  });
  for (const char* name : {"fail_after", "die_after"}) fake().set(name, -1);
  fake().set("heal", 0);
  const bool is_warned = told.find("lost the connection to rank ") != std::string::npos;
  if (is_retired != is_warned) std::fprintf(stderr, "seed %u: %s", seed, told.c_str());
  CHECK(is_retired == is_warned);
  if (is_retired && kind != 3) check_contains(told, " over NIC fake");
}

void check_lost_lanes() {
#ifdef __SANITIZE_THREAD__
  unsigned first = 0, last = 4;  // ten seconds each there
#else
  unsigned first = 0, last = 10;
#endif
  if (const char* const seeds = std::getenv("HOLMES_TEST_RDMA_SEEDS")) std::sscanf(seeds, "%u:%u", &first, &last);
  for (unsigned seed = first; seed < last; ++seed) check_lost_lane(seed);
  for (const char* name : {"hostile", "delay_us"}) fake().set(name, 0);
  fake().set("retry_ms", 50);
}

// One of two ports is left as soon as its HCA tells that it is lost, by who uses it and by the peer.
void check_events() {
  fake().set("retry_ms", 3'600'000);
  for (const auto& [event, why] : {std::tuple("port_down", "the HCA reports that the port is down"),
                                   std::tuple("device_fatal", "the HCA reports that it has failed"),
                                   std::tuple("pairs_fatal", "the HCA reports that the queue pair has failed")}) {
    for (const int lane : {0, 1}) {
      const std::string told = told_by([&] {
        std::barrier both(2);
        run_lanes(2, 2, [&](Communicator& comm) {
          work(comm, 2, 1);
          both.arrive_and_wait();
          if (comm.rank() == 0) fake().set(event, device_of(1, lane));
          for (unsigned seed = 0; seed < 3; ++seed) work(comm, 3, seed);
          if (comm.rank() == 1) {  // a busy machine may tell it late
            const auto has_retired = [&] {
              const auto connections = comm.connections();
              return std::ranges::any_of(connections, [](const ConnectionInfo& info) { return info.is_retired; });
            };
            for (int i = 0; i < 10'000 && !has_retired(); ++i) std::this_thread::sleep_for(1ms);
            CHECK(has_retired());
          }
          comm.barrier({})->wait();
        });
        fake().set("heal", 0);
      });
      check_contains(told, "over NIC fake" + std::to_string(device_of(1, lane)) + ":1 ");
      check_contains(told, std::string("): ") + why);
    }
  }
  fake().set("retry_ms", 50);
}

// A port that comes back is not used again, as with rails over TCP, until there is a new communicator: that uses it
// though the old one lives.
void check_return() {
  fake().set("retry_ms", 3'600'000);
  for (const int lane : {0, 1}) {
    const int device = device_of(1, lane);
    const std::string told = told_by([&] {
      std::barrier both(2);
      run_lanes(2, 2, [&](Communicator& comm) {
        const auto retired = [&] {
          const auto connections = comm.connections();
          return std::ranges::count_if(connections, [](const ConnectionInfo& info) { return info.is_retired; });
        };
        Bytes data(8 << 20);
        const Bytes sent = message(data.size(), 7);
        const auto exchange = [&](Communicator& by) {
          const auto arriving = by.recv(buffer(data, DType::uint8), 1 - by.rank(), 0, {.async = true});
          Bytes copy = sent;
          by.send(buffer(copy, DType::uint8), 1 - by.rank(), 0, {})->wait();
          arriving->wait();
          CHECK(data == sent);
        };
        exchange(comm);
        both.arrive_and_wait();
        if (comm.rank() == 0) fake().set("port_down", device);
        for (int i = 0; i < 1000; ++i) {  // both streams; what is received is asked for over each
          comm.all_reduce(buffer(data, DType::uint8), ReduceOp::max, {})->wait();
          exchange(comm);
          const std::int32_t done = retired() >= 2;
          std::vector<std::int32_t> all{done};
          comm.all_reduce(buffer(all, DType::int32), ReduceOp::min, {})->wait();
          if (all[0] != 0) break;
        }
        CHECK(retired() == 2);
        both.arrive_and_wait();
        if (comm.rank() == 0) fake().set("port_up", device);
        both.arrive_and_wait();
        const long before = fake().device_bytes(device);
        both.arrive_and_wait();
        work(comm, 3, 1);
        exchange(comm);
        CHECK(retired() == 2);
        both.arrive_and_wait();
        CHECK(fake().device_bytes(device) == before);
        both.arrive_and_wait();
        const auto renewed = comm.split(0, comm.rank());
        work(*renewed, 3, 1);
        exchange(*renewed);
        const auto connections = renewed->connections();
        CHECK(std::ranges::none_of(connections, [](const ConnectionInfo& info) { return info.is_retired; }));
        both.arrive_and_wait();
        CHECK(fake().device_bytes(device) > before);
      });
      fake().set("heal", 0);
    });
    check_contains(told, "over NIC fake" + std::to_string(device) + ":1 ");
    check_contains(told, "Make a new communicator to use the NIC again");
  }
  fake().set("retry_ms", 50);
}

// The last port that is lost: told by name, with the others.
void check_all_lanes_lost() {
  std::barrier both(2);
  run_lanes(2, 2, [&](Communicator& comm) {
    std::vector<std::int64_t> data(1 << 18, 1);
    comm.all_reduce(buffer(data, DType::int64), ReduceOp::sum, {})->wait();
    both.arrive_and_wait();
    if (comm.rank() == 0) fake().set("port_active", 0);
    both.arrive_and_wait();
    const auto start = Clock::now();
    try {
      for (int i = 0; i < 10; ++i) comm.all_reduce(buffer(data, DType::int64), ReduceOp::sum, {.timeout = 20s})->wait();
      CHECK(!"ports that are down were not noticed");
    } catch (const PeerLostError& error) {
      CHECK(Clock::now() - start < 7s);
      check_contains(error.what(), "(host ");
      check_contains(error.what(), comm.rank() == 0 ? "NIC fake0:1, fake2:1" : "NIC fake1:1, fake3:1");
    }
    both.arrive_and_wait();
  });
  fake().set("port_active", 1);
}

// What was sent by who does something else since, or is gone, arrives all the same.
void check_idle_sender() {
  fake().set("retry_ms", 200);
  for (const bool leaves : {false, true}) {
    std::barrier both(2);
    run_lanes(2, 2, [&](Communicator& comm) {
      Bytes data = comm.rank() == 0 ? message(100000, 7) : Bytes(100000);
      comm.barrier({})->wait();
      both.arrive_and_wait();
      if (comm.rank() == 0) {
        fake().set("fail_after", 0);
        comm.send(buffer(data, DType::uint8), 1, 0, {})->wait();
      } else {
        comm.recv(buffer(data, DType::uint8), 0, 0, {.timeout = 10s})->wait();
        CHECK(data == message(100000, 7));
      }
      if (!leaves) both.arrive_and_wait();
    });
    fake().set("fail_after", -1);
  }
  fake().set("retry_ms", 50);
}

}  // namespace

int main() {
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", "524288", 1);
  if (std::getenv("HOLMES_TEST_RDMA_SEEDS") == nullptr) {
    check_lanes();
    check_shares();
    check_all_lanes_lost();
    check_idle_sender();
    check_events();
    check_return();
  }
  check_lost_lanes();
  std::printf("several ports: ok\n");
  return 0;
}
