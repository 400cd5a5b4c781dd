// Communicators over RDMA, on the stand-in for libibverbs: every operation with completions that come late and in any
// order, what is left behind, and what is said where something fails.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <random>
#include <tuple>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/unmap_watch.hpp"
#include "holmes/transport/rdma/device.hpp"
#include "holmes/transport/rdma/probe.hpp"
#include "holmes/transport/shared_buffer.hpp"
#include "rdma_checks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

thread_local int clock_looks = 0;

}  // namespace

// In place of libc's: counts.
extern "C" int clock_gettime(clockid_t clock, timespec* now) {
  ++clock_looks;
  return static_cast<int>(::syscall(SYS_clock_gettime, clock, now));
}

namespace {

// What each rank is told where a communicator cannot be made.
std::vector<std::string> refusals(int size, const std::function<void(CommunicatorOptions&)>& change) {
  const auto store = make_local_store();
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  run_ranks(size, [&](int rank) {
    CommunicatorOptions options = options_of(rank, size);
    change(options);
    try {
      make_communicator(store, options);
    } catch (const HolmesError& error) {
      messages[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return messages;
}

// As check_everything; smaller where each access is looked at. From memory to memory the largest goes there too.
void check_all(Communicator& comm) {
#ifdef __SANITIZE_THREAD__
  constexpr std::size_t most = 100003;
#else
  constexpr std::size_t most = 300007;
#endif
  check_operations(comm, {0, 1, 7, 1000, 8193, 40001, most}, false);
  check_split(comm);
}

void check_operations() {
  for (const long delay_us : {0L, 300L}) {
    fake().set("delay_us", delay_us);
    for (int size = 2; size <= (delay_us == 0 ? 4 : 3); ++size) {
      fake().set("seed", size);
      run_communicators(size, Transport::rdma, check_all);
      check_nothing_left();
      std::printf("%d ranks, completions up to %ld us late: ok\n", size, 2 * delay_us);
    }
  }
  fake().set("delay_us", 0);
  fake().set("inline_limit", 48);  // some HCAs'
  run_communicators(2, Transport::rdma, check_all);
  check_nothing_left();
  fake().set("inline_limit", 256);
}

// Far more bytes and messages than the rings and queues hold, in both directions at once and one way.
void check_credits() {
  for (const std::size_t count : {std::size_t{1}, std::size_t{3 << 20}}) {
    run_communicators(2, Transport::rdma, [&](Communicator& comm) {
      const int rounds = count == 1 ? 3000 : 3;
      std::vector<std::int32_t> data(count);
      std::vector<WorkPtr> works;
      for (int i = 0; i < rounds; ++i) {
        if (comm.rank() == 0) {
          std::fill(data.begin(), data.end(), i);
          comm.send(buffer(data, DType::int32), 1, 0, {})->wait();
        } else {
          comm.recv(buffer(data, DType::int32), 0, 0, {})->wait();
          CHECK(data.front() == i && data.back() == i);
        }
      }
      comm.barrier({})->wait();
    });
    check_nothing_left();
  }
}

// Two ranks that sleep at once where they wait.
void run_sleepers(const std::function<void(Communicator&)>& body) {
  const auto store = make_local_store();
  run_ranks(2, [&](int rank) {
    CommunicatorOptions options = options_of(rank, 2);
    options.spin_us = 0;
    body(*make_communicator(store, options));
  });
  check_nothing_left();
}

// A sleeping receiver is woken for pieces of half a MiB, not for each message, and a sleeping sender not for credits.
void check_wakes() {
  fake().set("delay_us", 4000);
  std::barrier both(2);
  run_sleepers([&](Communicator& comm) {
    std::vector<std::uint8_t> data(1 << 20, 1);
    std::vector<std::uint8_t> reply(1);
    for (const bool is_counted : {false, true}) {  // the set-up had asked for any event
      both.arrive_and_wait();
      const long before = fake().events();
      both.arrive_and_wait();
      if (comm.rank() == 0) {
        std::this_thread::sleep_for(20ms);
        comm.send(buffer(data, DType::uint8), 1, 0, {})->wait();
        comm.recv(buffer(reply, DType::uint8), 1, 0, {})->wait();
      } else {
        comm.recv(buffer(data, DType::uint8), 0, 0, {})->wait();
        std::this_thread::sleep_for(100ms);
        comm.send(buffer(reply, DType::uint8), 0, 0, {})->wait();
      }
      both.arrive_and_wait();
      const long events = fake().events() - before;
      if (events > 4) std::fprintf(stderr, "%ld events\n", events);
      CHECK(!is_counted || events <= 4);
    }
    comm.barrier({})->wait();
  });
  fake().set("delay_us", 0);
}

// Each is a system call where the kernel has no vDSO, and some of the time of a small message where it has.
void check_clock_looks() {
  constexpr int rounds = 20;
  run_sleepers([&](Communicator& comm) {
    std::vector<std::uint8_t> data(64);
    std::vector<int> sends, receives;
    for (int i = 0; i < rounds; ++i) {
      for (const int sender : {0, 1}) {
        clock_looks = 0;
        if (comm.rank() == sender)
          comm.send(buffer(data, DType::uint8), 1 - comm.rank(), 0, {})->wait();
        else
          comm.recv(buffer(data, DType::uint8), 1 - comm.rank(), 0, {})->wait();
        (comm.rank() == sender ? sends : receives).push_back(clock_looks);
      }
    }
    for (auto* looks : {&sends, &receives}) std::ranges::sort(*looks);
    std::fprintf(stderr, "looks at the clock: %d to send 64 bytes, %d to receive them asleep\n", sends[rounds / 2],
                 receives[rounds / 2]);
    CHECK(sends[rounds / 2] <= 4);     // when it was called, when it ended, and two of the stand-in
    CHECK(receives[rounds / 2] <= 2);  // when it was called, and when it woke
  });
}

// Calls of the HCA in each of some rounds of a message each way, the fewest first.
std::vector<long> posts_of_rounds(std::size_t bytes) {
  constexpr int rounds = 20;
  std::barrier both(2);
  std::vector<long> posts;
  run_sleepers([&](Communicator& comm) {
    const int peer = 1 - comm.rank();
    Bytes data = message(bytes, 1);
    for (int i = 0; i <= rounds; ++i) {
      both.arrive_and_wait();
      if (comm.rank() == 0) posts.push_back(fake().posts());
      both.arrive_and_wait();
      if (i == rounds) break;
      if (comm.rank() == 0) comm.send(buffer(data, DType::uint8), peer, 0, {})->wait();
      comm.recv(buffer(data, DType::uint8), peer, 0, {})->wait();
      if (comm.rank() == 1) comm.send(buffer(data, DType::uint8), peer, 0, {})->wait();
    }
    CHECK(data == message(bytes, 1));
  });
  std::adjacent_difference(posts.begin(), posts.end(), posts.begin());
  posts.erase(posts.begin());
  std::ranges::sort(posts);
  return posts;
}

// Each is a system call over Soft-RoCE. A message from memory to memory is one for its header and the offer, and one
// for each read, the last of which takes the answer along. One through the rings is one for the first 128 KiB and one
// for the rest; what the peer may send again goes with these. (Now and then a rank asks whether the path lives.)
void check_posts() {
  const std::vector<long> direct = posts_of_rounds(1 << 20);
  const std::vector<long> by_rings = posts_of_rounds(256 << 10);
  const long usual = by_rings[3 * by_rings.size() / 4];
  std::fprintf(stderr, "a round of 1 MiB: %ld posts, of 256 KiB: %ld\n", direct[direct.size() / 2], usual);
  CHECK(direct[direct.size() / 2] == 2 * (1 + (1 << 20) / (256 * 1024)));
  CHECK(usual == 2 * 2);
}

// What is sent of registered memory is copied into no ring, and given to the HCA at once: of an all_reduce each rank's
// header and contribution, and each of two slices of results.
void check_lent() {
  constexpr int rounds = 20;
  constexpr std::size_t bytes = 3 << 18;  // of which the halves are too small to be read from memory to memory
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  if (limit.rlim_cur < 8 << 20) return void(std::printf("lent memory: not tried, ulimit -l is too low\n"));
  std::vector<long> posts;
  std::barrier both(2);
  run_sleepers([&](Communicator& comm) {
    SharedBuffer memory(bytes);
    const Buffer data{memory.data(), bytes / 4, DType::int32, nullptr};
    auto* const values = reinterpret_cast<std::int32_t*>(memory.data());
    for (int i = 0; i <= rounds; ++i) {
      for (std::size_t k = 0; k < bytes / 4; ++k) values[k] = static_cast<std::int32_t>(k) + comm.rank();
      both.arrive_and_wait();
      if (comm.rank() == 0) posts.push_back(fake().posts());
      both.arrive_and_wait();
      if (i == rounds) break;
      comm.all_reduce(data, ReduceOp::sum, {})->wait();
      for (std::size_t k = 0; k < bytes / 4; ++k) CHECK(values[k] == 2 * static_cast<std::int32_t>(k) + 1);
    }
  });
  check_nothing_left();
  // Of all rounds together: what ends one may be posted in the next.
  const long all = posts.back() - posts.front();
  std::fprintf(stderr, "all_reduce of 768 KiB of registered memory: %ld posts in %d rounds\n", all, rounds);
  CHECK(all >= rounds * 2 * 2 && all <= rounds * 2 * 4);  // a credit may have to go by itself
}

// It is the caller's again when the operation ends, and no sooner is it sent: who writes it then harms nobody.
void check_lent_memory_is_given_back() {
  fake().set("hostile", 1);
  for (const long delay_us : {0L, 300L, 3000L}) {
    fake().set("delay_us", delay_us);
    for (int size = 2; size <= 3; ++size) {
      fake().set("seed", size + delay_us);
      run_communicators(size, Transport::rdma, [&](Communicator& comm) {
        constexpr std::size_t most = 200 << 10;  // of all ranks together a quarter of 8 MiB
        const auto ranks = static_cast<std::size_t>(size);
        const auto own = static_cast<std::size_t>(comm.rank());
        SharedBuffer memory(ranks * most);
        auto* const values = reinterpret_cast<std::uint8_t*>(memory.data());
        for (const std::size_t bytes : {std::size_t{65535}, std::size_t{65536}, std::size_t{150007}, most}) {
          for (std::size_t number = 0; number < 3; ++number) {
            std::vector<Buffer> all;
            for (std::size_t rank = 0; rank < ranks; ++rank)
              all.push_back({memory.data() + rank * bytes, bytes, DType::uint8, nullptr});
            fill_message(values + own * bytes, bytes, number + own);
            comm.all_gather(all, all[own], {})->wait();
            std::memset(values + own * bytes, 0xee, bytes);
            for (std::size_t rank = 0; rank < ranks; ++rank)
              CHECK(rank == own ||
                    std::memcmp(values + rank * bytes, message(bytes, number + rank).data(), bytes) == 0);
            fill_message(values, bytes, number + own);
            comm.all_reduce(all[0], ReduceOp::max, {})->wait();
            Bytes greatest = message(bytes, number);
            for (std::size_t rank = 1; rank < ranks; ++rank)
              take_greater(greatest.data(), message(bytes, number + rank).data(), bytes);
            CHECK(std::memcmp(values, greatest.data(), bytes) == 0);
            std::memset(values, 0xee, bytes);
          }
        }
      });
      check_nothing_left();
    }
  }
  // And where the communicator ends in the middle.
  fake().set("delay_us", 40000);
  for (const auto pause : {1ms, 20ms, 60ms}) {
    const auto store = make_local_store();
    std::barrier both(2);
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      SharedBuffer memory(1 << 20);
      std::memset(memory.data(), 1, memory.bytes());
      both.arrive_and_wait();
      const auto work =
          comm->all_reduce({memory.data(), memory.bytes(), DType::uint8, nullptr}, ReduceOp::sum, {.async = true});
      std::this_thread::sleep_for(pause);
      if (rank == 1) comm->abort("on purpose");
      try {
        work->wait();
      } catch (const HolmesError&) {
      }
      const auto own = static_cast<std::byte>(7 + rank);
      std::memset(memory.data(), 7 + rank, memory.bytes());
      std::this_thread::sleep_for(200ms);
      CHECK(std::all_of(memory.data(), memory.data() + memory.bytes(), [own](std::byte byte) { return byte == own; }));
      both.arrive_and_wait();
    });
    check_nothing_left();
  }
  fake().set("delay_us", 0);
  fake().set("hostile", 0);
}

// Bytes that went from memory to memory while two ranks ran `body`.
long direct_bytes(const std::function<void(Communicator&)>& body) {
  const long before = fake().read_bytes();
  run_communicators(2, Transport::rdma, body);
  check_nothing_left();
  return fake().read_bytes() - before;
}

// Of many sizes, both ways at once, each message in memory of its own that is freed at once; smaller ones between them.
void exchange_messages(Communicator& comm, const std::vector<std::size_t>& sizes) {
  for (std::size_t number = 0; number < sizes.size(); ++number) {
    const int peer = 1 - comm.rank();
    const auto own = static_cast<std::size_t>(comm.rank());
    auto sent = std::make_unique<Bytes>(message(sizes[number], 2 * number + own));
    auto received = std::make_unique<Bytes>(sizes[number]);
    const auto arriving = comm.recv(buffer(*received, DType::uint8), peer, 0, {.async = true});
    comm.send(buffer(*sent, DType::uint8), peer, 0, {})->wait();
    std::ranges::fill(*sent, 0xee);
    sent.reset();
    arriving->wait();
    CHECK(*received == message(sizes[number], 2 * number + 1 - own));
  }
}

// From memory to memory: what was sent, and only what is large.
void check_direct() {
  const std::vector<std::size_t> sizes{524287, 524288, 100, 3000001, 1, (8 << 20) + 524288, (8 << 20) + 7, 600000};
  const long most = 2L * (524288 + 3000001 + (8 << 20) + 524288 + (8 << 20) + 600000);
  for (const auto& [delay_us, inline_limit] : {std::tuple(0L, 256L), std::tuple(300L, 256L), std::tuple(0L, 48L)}) {
    fake().set("delay_us", delay_us);
    fake().set("inline_limit", inline_limit);
    CHECK(direct_bytes([&](Communicator& comm) { exchange_messages(comm, sizes); }) == most);
  }
  fake().set("inline_limit", 256);
  fake().set("delay_us", 0);
  fake().set("fork_state", 1);  // a child would take the memory away, or lack it
  CHECK(direct_bytes([&](Communicator& comm) { exchange_messages(comm, sizes); }) == 0);
  fake().set("fork_state", 2);
  // The sender cannot register it, or the receiver cannot.
  constexpr long rings = 4 * (4096 + 2 * (2 << 20));
  for (const long more : {5L << 19, 3L << 20}) {
    std::barrier both(2);
    CHECK(direct_bytes([&](Communicator& comm) {
            both.arrive_and_wait();
            if (comm.rank() == 0) fake().set("memory_limit", rings + more);
            both.arrive_and_wait();
            Bytes data = comm.rank() == 0 ? message(3 << 20, 5) : Bytes(3 << 20);
            if (comm.rank() == 0) comm.send(buffer(data, DType::uint8), 1, 0, {})->wait();
            if (comm.rank() == 1) comm.recv(buffer(data, DType::uint8), 0, 0, {})->wait();
            CHECK(data == message(3 << 20, 5));
            both.arrive_and_wait();
            if (comm.rank() == 0) fake().set("memory_limit", -1);
            both.arrive_and_wait();
            exchange_messages(comm, {1 << 20});  // and again, once it can
          }) == 2 << 20);
  }
}

void check_direct_collectives() {
  for (const long delay_us : {0L, 300L}) {
    fake().set("delay_us", delay_us);
    for (int size = 2; size <= 3; ++size) {
      fake().set("seed", size);
      run_communicators(size, Transport::rdma, check_large_collectives);
      check_nothing_left();
    }
  }
  fake().set("delay_us", 0);
  // As long as what a rank may send ahead of what comes, its header not counted.
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", "1048576", 1);
  for (int size = 2; size <= 3; ++size) run_communicators(size, Transport::rdma, check_large_collectives);
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", "524288", 1);
  // In the pieces that it works in, the root reads all that the other rank has.
  CHECK(direct_bytes([](Communicator& comm) {
          Bytes data(8 << 20, 1);
          comm.reduce(buffer(data, DType::uint8), 0, ReduceOp::sum, {})->wait();
          CHECK(comm.rank() != 0 || std::ranges::all_of(data, [](std::uint8_t byte) { return byte == 2; }));
        }) == 8 << 20);
}

// A shared buffer is registered once, whatever is sent of it, and no longer than it lives; not in a forked child.
void check_registered_once() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  if (limit.rlim_cur < 8 << 20) return void(std::printf("registered once: not tried, ulimit -l is too low\n"));
  std::barrier both(2);
  run_communicators(2, Transport::rdma, [&](Communicator& comm) {
    auto memory = std::make_unique<SharedBuffer>(1 << 20);
    const Buffer data{memory->data(), std::size_t{1} << 20, DType::uint8, nullptr};
    const auto exchange = [&] {
      std::memset(memory->data(), 1 + comm.rank(), memory->bytes());
      std::vector<Buffer> halves;
      for (const std::size_t half : {0, 1})
        halves.push_back({memory->data() + (half << 19), 1 << 19, DType::uint8, nullptr});
      comm.all_gather(halves, halves[static_cast<std::size_t>(comm.rank())], {})->wait();
      CHECK(memory->data()[(1 << 19) - 1] == std::byte{1} && memory->data()[memory->bytes() - 1] == std::byte{2});
      if (comm.rank() == 0) comm.send(data, 1, 0, {})->wait();
      if (comm.rank() == 1) comm.recv(data, 0, 0, {})->wait();
    };
    exchange();
    both.arrive_and_wait();
    const long before = fake().registrations();
    const long bytes = fake().registered_bytes();
    for (int i = 0; i < 3; ++i) exchange();
    both.arrive_and_wait();
    CHECK(fake().registrations() == before);
    if (comm.rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        memory.reset();
        ::_exit(0);
      }
      int status = -1;
      CHECK(::waitpid(child, &status, 0) == child && status == 0);
    }
    both.arrive_and_wait();
    exchange();
    both.arrive_and_wait();
    CHECK(fake().registrations() == before && fake().registered_bytes() == bytes);
    both.arrive_and_wait();
    memory.reset();
    both.arrive_and_wait();
    CHECK(fake().registered_bytes() == bytes - (2 << 20));
    both.arrive_and_wait();
    // One that is too large for that is registered for each message.
    if (limit.rlim_cur <= 64 << 20) {
      memory = std::make_unique<SharedBuffer>(limit.rlim_cur / 4 + 1);
      const Buffer part{memory->data(), std::size_t{1} << 20, DType::uint8, nullptr};
      if (comm.rank() == 0) comm.send(part, 1, 0, {})->wait();
      if (comm.rank() == 1) comm.recv(part, 0, 0, {})->wait();
      both.arrive_and_wait();
      CHECK(fake().registered_bytes() == bytes - (2 << 20));
      both.arrive_and_wait();
    }
    // What does not fit goes by the ring.
    if (comm.rank() == 0) fake().set("memory_limit", fake().registered_bytes() + (1 << 19));
    both.arrive_and_wait();
    memory = std::make_unique<SharedBuffer>(1 << 20);
    const Buffer other{memory->data(), std::size_t{1} << 20, DType::uint8, nullptr};
    std::memset(memory->data(), 7 * (1 - comm.rank()), memory->bytes());
    if (comm.rank() == 0) comm.send(other, 1, 0, {})->wait();
    if (comm.rank() == 1) comm.recv(other, 0, 0, {})->wait();
    CHECK(memory->data()[9] == std::byte{7});
    both.arrive_and_wait();
    if (comm.rank() == 0) fake().set("memory_limit", -1);
    both.arrive_and_wait();
  });
  check_nothing_left();
}

// Of a thousand communicators, with messages through rings and from memory to memory.
void check_many_made() {
#ifdef __SANITIZE_THREAD__
  constexpr int count = 50;
#else
  constexpr int count = 1000;
#endif
  const auto descriptors = [] {
    std::vector<std::string> found;
    for (const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      found.push_back(one.path().filename().string() + " " + std::filesystem::read_symlink(one.path(), gone).string());
    }
    return found;
  };
  std::vector<std::vector<std::string>> held;
  for (int i = 0; i < count; ++i) {
    run_communicators(2, Transport::rdma, [&](Communicator& comm) {
      Bytes data(i % 10 == 0 ? 1 << 19 : 100, 1);
      comm.all_reduce(buffer(data, DType::uint8), ReduceOp::sum, {})->wait();
      CHECK(std::ranges::all_of(data, [](std::uint8_t byte) { return byte == 2; }));
    });
    if (i % (count / 5) == 0) held.push_back(descriptors());
  }
  check_nothing_left();
  if (held.back().size() != held[1].size())
    for (const auto* const some : {&held[1], &held.back()})
      for (const std::string& one : *some) std::printf("%s: %s\n", some == &held[1] ? "before" : "after", one.c_str());
  CHECK(held.back().size() == held[1].size());
}

// Ordinary memory: registered by its first two messages each, and then kept, until it is unmapped.
void check_kept_registered() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  if (limit.rlim_cur < 8 << 20) return void(std::printf("kept registered: not tried, ulimit -l is too low\n"));
  constexpr std::size_t bytes = 1 << 19;  // of each of two ranks: an eighth of 8 MiB
  const auto map = [](void* at) {
    void* const made =
        ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED_NOREPLACE : 0), -1, 0);
    return made == MAP_FAILED ? nullptr : static_cast<std::uint8_t*>(made);
  };
  std::uint8_t* const probe = map(nullptr);
  const auto ticket = unmap_watch::watch(probe, bytes);
  if (ticket) unmap_watch::release(*ticket);
  ::munmap(probe, bytes);
  if (!ticket) return void(std::printf("kept registered: not tried, this system has no userfaultfd\n"));
  std::barrier both(2);
  run_communicators(2, Transport::rdma, [&](Communicator& comm) {
    std::uint8_t* memory = map(nullptr);
    std::uint8_t value = 0;
    const auto exchange = [&] {
      ++value;
      std::memset(memory, comm.rank() == 0 ? value : 0, bytes);
      const Buffer data{memory, bytes, DType::uint8, nullptr};
      if (comm.rank() == 0) comm.send(data, 1, 0, {})->wait();
      if (comm.rank() == 1) comm.recv(data, 0, 0, {})->wait();
      CHECK(std::all_of(memory, memory + bytes, [&](std::uint8_t byte) { return byte == value; }));
      both.arrive_and_wait();
    };
    const auto registrations = [&](int rounds) {
      both.arrive_and_wait();
      const long before = fake().registrations();
      both.arrive_and_wait();
      for (int i = 0; i < rounds; ++i) exchange();
      const long made = fake().registrations() - before;
      both.arrive_and_wait();
      return made;
    };
    CHECK(registrations(2) == 4);  // each rank, each time
    CHECK(registrations(4) == 0);
    // Unmapped, and something else in its place, which no HCA knows.
    for (int i = 0; i < 3; ++i) {
      std::uint8_t* const place = memory;
      ::munmap(memory, bytes);
      memory = map(place);
      if (!memory) memory = map(nullptr);  // another thread was faster
      both.arrive_and_wait();
      const long made = registrations(3);
      CHECK(made >= 2 && made <= 4);
      CHECK(registrations(2) == 0);
    }
    // Its pages are others now, at the same place.
    ::madvise(memory, bytes, MADV_DONTNEED);
    CHECK(registrations(2) >= 2);
    // A forked child that writes has pages of its own; and unmaps what is its own.
    if (comm.rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        std::memset(memory, 99, bytes);
        ::munmap(memory, bytes);
        ::_exit(0);
      }
      int status = -1;
      CHECK(::waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(registrations(3) == 0);
    ::munmap(memory, bytes);
    both.arrive_and_wait();
  });
  check_nothing_left();
  // Where forks take pages away nothing is registered, where somebody says so each message anew.
  for (const bool is_said : {false, true}) {
    if (is_said) ::setenv("HOLMES_RDMA_KEEP_REGISTERED", "0", 1);
    fake().set("fork_state", is_said ? 2 : 0);
    run_communicators(2, Transport::rdma, [&](Communicator& comm) {
      Bytes data(bytes, 3);
      both.arrive_and_wait();
      const long before = fake().registrations();
      both.arrive_and_wait();
      for (int i = 0; i < 4; ++i) {
        if (comm.rank() == 0) comm.send(buffer(data, DType::uint8), 1, 0, {})->wait();
        if (comm.rank() == 1) comm.recv(buffer(data, DType::uint8), 0, 0, {})->wait();
      }
      both.arrive_and_wait();
      CHECK(fake().registrations() == before + (is_said ? 8 : 0));
      both.arrive_and_wait();
    });
  }
  ::unsetenv("HOLMES_RDMA_KEEP_REGISTERED");
  check_nothing_left();
}

// A message that comes before its receive is posted goes by the ring, to memory that may move.
void check_unexpected() {
  for (int seed = 0; seed < 8; ++seed) {
    fake().set("seed", seed);
    fake().set("delay_us", seed % 2 == 0 ? 0 : 500);
    direct_bytes([&](Communicator& comm) {
      Bytes first = comm.rank() == 0 ? message(5 << 20, 1) : Bytes(5 << 20);
      Bytes second = comm.rank() == 0 ? message(1 << 20, 2) : Bytes(1 << 20);
      if (comm.rank() == 0) {
        const auto sending = comm.send(buffer(first, DType::uint8), 1, 1, {.async = true});
        comm.send(buffer(second, DType::uint8), 1, 2, {})->wait();
        sending->wait();
      } else {
        const auto other = comm.recv(buffer(second, DType::uint8), 0, 2, {.async = true});
        std::this_thread::sleep_for(std::chrono::microseconds(200 * (seed / 2)));
        comm.recv(buffer(first, DType::uint8), 0, 1, {})->wait();
        other->wait();
      }
      CHECK(first == message(5 << 20, 1) && second == message(1 << 20, 2));
    });
  }
  fake().set("delay_us", 0);
}

// Memory is the caller's again once its work has failed: a request that is under way then touches it no more.
void check_memory_after_abort() {
  for (const auto& [aborting, pause, is_collective] :
       {std::tuple(0, 1ms, false), std::tuple(0, 30ms, false), std::tuple(0, 60ms, false), std::tuple(1, 1ms, false),
        std::tuple(1, 30ms, false), std::tuple(1, 60ms, false), std::tuple(0, 60ms, true),
        std::tuple(1, 100ms, true)}) {
    fake().set("delay_us", 40000);
    const auto store = make_local_store();
    std::barrier both(2);
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      Bytes data(4 << 20, 1);
      both.arrive_and_wait();
      const auto work = is_collective ? comm->all_reduce(buffer(data, DType::uint8), ReduceOp::sum, {.async = true})
                        : rank == 0   ? comm->send(buffer(data, DType::uint8), 1, 0, {.async = true})
                                      : comm->recv(buffer(data, DType::uint8), 0, 0, {.async = true});
      std::this_thread::sleep_for(pause);
      if (rank == aborting) comm->abort("on purpose");
      try {
        work->wait();
      } catch (const HolmesError&) {
      }
      const auto own = static_cast<std::uint8_t>(7 + rank);
      std::ranges::fill(data, own);
      std::this_thread::sleep_for(200ms);
      CHECK(std::ranges::all_of(data, [own](std::uint8_t byte) { return byte == own; }));
      both.arrive_and_wait();
    });
    check_nothing_left();
  }
  fake().set("delay_us", 0);
}

// And so it is where a request is lost, be it the header, the offer, a read or the answer that follows it. Who has its
// message all the same has all of it.
void check_memory_after_loss() {
  fake().set("delay_us", 2000);
  for (long after = 0; after < 8; ++after) {
    const auto store = make_local_store();
    std::barrier both(2);
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      Bytes data = rank == 0 ? message(1 << 20, 3) : Bytes(1 << 20);
      both.arrive_and_wait();
      if (rank == 0) fake().set("fail_after", after);
      both.arrive_and_wait();
      bool is_lost = false;
      for (int round = 0; round < 4 && !is_lost; ++round) {
        if (rank == 1) std::ranges::fill(data, 0);
        try {
          if (rank == 0) comm->send(buffer(data, DType::uint8), 1, 0, {.timeout = 20s})->wait();
          if (rank == 1) comm->recv(buffer(data, DType::uint8), 0, 0, {.timeout = 20s})->wait();
          CHECK(data == message(1 << 20, 3));
        } catch (const PeerLostError&) {
          is_lost = true;
        }
      }
      const auto own = static_cast<std::uint8_t>(7 + rank);
      std::ranges::fill(data, own);
      std::this_thread::sleep_for(20ms);
      CHECK(std::ranges::all_of(data, [own](std::uint8_t byte) { return byte == own; }));
      both.arrive_and_wait();
    });
    fake().set("fail_after", -1);
    check_nothing_left();
  }
  fake().set("delay_us", 0);
}

// What was sent last arrives though the sender is gone at once.
void check_orderly_end() {
  fake().set("delay_us", 20000);
  for (int i = 0; i < 5; ++i) {
    run_communicators(2, Transport::rdma, [&](Communicator& comm) {
      std::vector<std::int64_t> data = values(0, 100000);
      if (comm.rank() == 1) std::fill(data.begin(), data.end(), 0);
      comm.broadcast(buffer(data, DType::int64), 0, {})->wait();
      CHECK(data == values(0, 100000));
    });
  }
  fake().set("delay_us", 0);
  check_nothing_left();
}

void check_mtu() {
  CHECK(rdma_mtu_bytes("fake0") == 1024 && rdma_mtu_bytes("fake1:1") == 1024);
  try {
    rdma_mtu_bytes("fake1:2");
    CHECK(!"a port that is not there has an MTU");
  } catch (const NicError& error) {
    check_contains(error.what(), "HCA fake1 has no port '2'");
  }
  check_nothing_left();
}

void check_connections() {
  run_communicators(2, Transport::rdma, [](Communicator& comm) {
    std::vector<std::int64_t> data(100000, 1);
    comm.all_reduce(buffer(data, DType::int64), ReduceOp::sum, {})->wait();
    std::uint64_t sent = 0;
    for (const ConnectionInfo& info : comm.connections()) {
      if (info.purpose == "control") continue;
      CHECK(info.transport == "rdma");
      CHECK(info.interface == (comm.rank() == 0 ? "fake0:1" : "fake1:1"));
      check_contains(info.local_address, comm.rank() == 0 ? "::ffff:10.0.0.1 qp " : "::ffff:10.0.0.2 qp ");
      sent += info.sent_bytes;
    }
    CHECK(sent >= 100000 * sizeof(std::int64_t) / 2);
  });
}

// A request that gets no answer: both ranks are told within the deadline, by name.
void check_lost_path() {
  for (long after = 0; after < 12; after += 3) {
    const auto store = make_local_store();
    std::atomic<int> ready{0};
    run_ranks(2, [&](int rank) {
      const auto comm = make_communicator(store, options_of(rank, 2));
      std::vector<std::int64_t> data(1 << 20, 1);
      comm->all_reduce(buffer(data, DType::int64), ReduceOp::sum, {})->wait();
      if (++ready == 2) fake().set("fail_after", after);
      while (ready < 2) std::this_thread::yield();
      const auto start = Clock::now();
      try {
        for (int i = 0; i < 10; ++i)
          comm->all_reduce(buffer(data, DType::int64), ReduceOp::sum, {.timeout = 10s})->wait();
        CHECK(!"a lost request was not noticed");
      } catch (const PeerLostError& error) {
        CHECK(Clock::now() - start < 5s);
        check_contains(error.what(), "rank " + std::to_string(1 - *error.context().rank));
        check_contains(error.what(), "(host ");
        check_contains(error.what(), *error.context().rank == 0 ? "NIC fake0:1" : "NIC fake1:1");
        check_contains(error.what(), "is lost");
      }
    });
    fake().set("fail_after", -1);
    check_nothing_left();
  }
}

// Who only receives has nothing that could fail, but asks.
void check_port_down_while_receiving() {
  const auto store = make_local_store();
  std::barrier both(2);
  run_ranks(2, [&](int rank) {
    const auto comm = make_communicator(store, options_of(rank, 2));
    std::vector<std::int64_t> data(1000, 1);
    both.arrive_and_wait();  // one may have its communicator while the other still agrees on it
    if (rank == 0) fake().set("port_active", 0);
    both.arrive_and_wait();
    const auto start = Clock::now();
    try {
      if (rank == 1) comm->recv(buffer(data, DType::int64), 0, 0, {.timeout = 20s})->wait();
      if (rank == 0) comm->recv(buffer(data, DType::int64), 1, 0, {.timeout = 20s})->wait();
      CHECK(!"a port that is down was not noticed");
    } catch (const PeerLostError& error) {
      CHECK(Clock::now() - start < 5s);
      check_contains(error.what(), "NIC fake");
    }
  });
  fake().set("port_active", 1);
  check_nothing_left();
}

// What HCAs tell by themselves ends what waits, long before they give up; all communicators of the port are told.
void check_events() {
  set_log_level(LogLevel::info);
  fake().set("retry_ms", 3'600'000);
  for (const auto& [event, why] : {std::tuple("port_down", "the HCA reports that the port is down"),
                                   std::tuple("device_fatal", "the HCA reports that it has failed"),
                                   std::tuple("pairs_fatal", "the HCA reports that the queue pair has failed")}) {
    const std::string told = told_by([&] {
      const auto store = make_local_store();
      std::barrier both(2);
      run_ranks(2, [&](int rank) {
        std::vector<std::shared_ptr<Communicator>> groups;
        for (const char* name : {"first", "second"})
          groups.push_back(make_communicator(store, options_of(rank, 2, name)));
        Bytes data(1000), small(1);
        std::vector<WorkPtr> works;
        for (const auto& group : groups) {
          group->all_reduce(buffer(small, DType::uint8), ReduceOp::sum, {})->wait();
          works.push_back(group->recv(buffer(data, DType::uint8), 1 - rank, 0, {.async = true}));
        }
        both.arrive_and_wait();
        if (rank == 0) fake().set(event, 1);  // the other rank's HCA
        const auto start = Clock::now();
        for (const auto& work : works) {
          try {
            work->wait();
            CHECK(!"a port that is lost was not noticed");
          } catch (const PeerLostError& error) {
            CHECK(Clock::now() - start < 10s);
            check_contains(error.what(), "rank 0 (host ");
            check_contains(error.what(), "NIC fake1:1");
            check_contains(error.what(), "is lost");
          }
        }
        both.arrive_and_wait();
      });
      fake().set("heal", 0);
      check_nothing_left();
    });
    check_contains(told, why);
    CHECK(contains(told, "over fake1:1 ") && told.find("over fake0:1 ") == std::string::npos);
  }
  fake().set("retry_ms", 50);
}

// A port that is down for a moment loses nothing; each event is acknowledged, whoever it is of.
void check_flaps() {
  fake().set("retry_ms", 3'600'000);
  std::mt19937 random(5);
  const long before = fake().told();
  const std::string told = told_by([&] {
    std::barrier both(2);
    run_communicators(2, Transport::rdma, [&](Communicator& comm) {
      for (int round = 0; round < 20; ++round) {
        Bytes data = comm.rank() == 0 ? message(3 << 20, 1) : Bytes(3 << 20);
        both.arrive_and_wait();
        const auto work = comm.broadcast(buffer(data, DType::uint8), 0, {.async = true});
        if (comm.rank() == 0) {
          const long device = static_cast<long>(random() % 2);
          fake().set("port_down", device);
          if (round % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
          fake().set("port_up", device);
        }
        work->wait();
        CHECK(data == message(3 << 20, 1));
      }
    });
    check_nothing_left();
  });
  CHECK(told.find("lost") == std::string::npos && told.find("fail") == std::string::npos);
  CHECK(fake().told() > before);
  fake().set("retry_ms", 50);
}

void check_abort() {
  const auto store = make_local_store();
  std::barrier all(3);
  run_ranks(3, [&](int rank) {
    const auto comm = make_communicator(store, options_of(rank, 3));
    std::vector<std::int64_t> data(1000, 1);
    all.arrive_and_wait();  // one may have its communicator while the others still agree on it
    if (rank == 2) {
      comm->abort("on purpose");
      return;
    }
    const std::string message = [&]() -> std::string {
      try {
        comm->all_reduce(buffer(data, DType::int64), ReduceOp::sum, {})->wait();
      } catch (const HolmesError& error) {
        return error.what();
      }
      return "no error";
    }();
    check_contains(message, "on purpose");
  });
  check_nothing_left();
}

// What finds clusters: the other end's process does nothing, and one that is not there is not reached.
void check_probes() {
  {
    const auto device = [](int rank) { return std::make_shared<RdmaDevice>(rdma_port(rank), Env::read()); };
    RdmaProbe one(device(0)), other(device(1)), alone(device(0));
    one.connect(other.endpoint());
    other.connect(one.endpoint());
    CHECK(one.reaches(5s) && other.reaches(5s));
    CHECK(!one.meets(10ms));  // the other end has not called it
    CHECK(other.meets(5s));   // but comes later
    std::thread there([&] { CHECK(other.meets(5s) && other.carries(20ms, 50ms) > 1e6 && other.meets(5s)); });
    CHECK(one.meets(5s) && one.carries(20ms, 50ms) > 1e6 && one.meets(5s));
    there.join();
    fake().set("memory_limit", 65536);
    try {
      const RdmaProbe large(device(0), RdmaRings::bytes_for(2));
      CHECK(false);
    } catch (const SystemError& error) {
      check_contains(error.what(), "ulimit -l");
    }
    fake().set("memory_limit", -1);
    alone.connect(other.endpoint());  // which is connected to another one
    const auto start = Clock::now();
    CHECK(!alone.reaches(10ms) && Clock::now() - start < 5s);
    try {
      alone.connect("what no endpoint is");
      CHECK(false);
    } catch (const ProtocolError& error) {
      check_contains(error.what(), "same version");
    }
  }
  check_nothing_left();
}

void check_refusals() {
  const auto check_all = [](const std::vector<std::string>& messages, const std::vector<std::string>& parts) {
    for (const std::string& message : messages)
      for (const std::string& part : parts) check_contains(message, part);
    check_nothing_left();
  };
  check_all(refusals(2, [](CommunicatorOptions& options) { options.tls = TlsMode::all; }),
            {"rdma has no encryption", "tls='all'"});
  check_all(refusals(2,
                     [](CommunicatorOptions& options) {
                       if (options.rank == 1) options.rdma_ports = {"mlx5_7:1"};
                     }),
            {"rank 1", "knows no HCA 'mlx5_7'", "it knows: fake0, fake1"});
  check_all(refusals(2,
                     [](CommunicatorOptions& options) {
                       if (options.rank == 1) options.rdma_ports = {"fake1:3"};
                     }),
            {"HCA fake1 has no port '3'"});
  check_all(refusals(2,
                     [](CommunicatorOptions& options) {
                       if (options.rank == 1) options.rdma_ports.clear();
                     }),
            {"rank 1", "has no RDMA port"});
  check_all(refusals(2, [](CommunicatorOptions& options) { options.rdma_ports.assign(9, "fake0:1"); }),
            {"uses 8 ports of a rank at most, but 9"});
  check_all(refusals(2,
                     [](CommunicatorOptions& options) {
                       if (options.rank == 1) options.rdma_ports = {"fake1:1", "fake3:1"};
                     }),
            {"uses fake0:1 and", "fake1:1, fake3:1", "max_rails"});
  check_all(refusals(3,
                     [](CommunicatorOptions& options) {
                       options.clusters = {0, 0, 1};
                       if (options.rank == 1) options.rdma_ports.clear();
                     }),
            {"rank 1", "has no RDMA port"});
  fake().set("memory_limit", 65536);
  check_all(refusals(2, [](CommunicatorOptions&) {}), {"cannot register", "HCA fake", "ulimit -l", "LimitMEMLOCK"});
  fake().set("memory_limit", -1);
  fake().set("port_active", 0);
  check_all(refusals(2, [](CommunicatorOptions&) {}), {"port fake0:1 is down", "not active"});
  fake().set("port_active", 1);
  fake().set("fail_after", 0);  // the proof of the path
  check_all(refusals(2, [](CommunicatorOptions&) {}), {"does not answer over RDMA", "fake", "HOLMES_RDMA_"});
  fake().set("fail_after", -1);
  for (const auto& [variable, value, part] : {std::tuple("HOLMES_RDMA_GID_INDEX", "7", "has no GID number 7"),
                                              std::tuple("HOLMES_RDMA_MTU", "4096", "active MTU is 1024"),
                                              std::tuple("HOLMES_RDMA_PKEY_INDEX", "1", "has no P_Key number 1")}) {
    const std::string before = std::getenv(variable) ? std::getenv(variable) : "";
    ::setenv(variable, value, 1);
    check_all(refusals(2, [](CommunicatorOptions&) {}), {part, variable});
    if (before.empty())
      ::unsetenv(variable);
    else
      ::setenv(variable, before.c_str(), 1);
  }
}

}  // namespace

int main() {
  if (std::getenv("HOLMES_TEST_RDMA_PORTS")) {  // real ones (tests/rdma)
    for (int size = 2; size <= 3; ++size) {
      run_communicators(size, Transport::rdma, [](Communicator& comm) { check_everything(comm); });
      std::printf("%d ranks: ok\n", size);
    }
    return 0;
  }
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", "524288", 1);
  check_operations();
  check_credits();
  check_wakes();
  check_clock_looks();
  check_posts();
  check_lent();
  check_lent_memory_is_given_back();
  check_direct();
  check_direct_collectives();
  check_registered_once();
  check_kept_registered();
  check_many_made();
  check_unexpected();
  check_memory_after_abort();
  check_memory_after_loss();
  check_orderly_end();
  check_mtu();
  check_connections();
  check_lost_path();
  check_port_down_while_receiving();
  check_flaps();
  check_abort();
  check_probes();
  check_refusals();
  check_events();
  std::printf("RDMA: ok\n");
  return 0;
}
