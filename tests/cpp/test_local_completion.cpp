// CommunicatorOptions::local_completion: operations with a root end on a rank when its own part is done; the numbers
// stay right whoever is late, and who is missing or disagrees is told by a later operation.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <random>
#include <thread>

#include "collective_checks.hpp"
#include "holmes/collectives/chain_broadcast.hpp"
#include "holmes/collectives/tree_broadcast.hpp"
#include "holmes/comm/host_communicator.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

void run_local(int size, Transport transport, const std::function<void(Communicator&)>& body, Duration timeout = 60s) {
  ::setenv("HOLMES_LOCAL_COMPLETION", "1", 1);
  run_communicators(size, transport, body, 1, timeout);
  ::unsetenv("HOLMES_LOCAL_COMPLETION");
}

void wait_for(const std::atomic<bool>& flag) {
  while (!flag) std::this_thread::sleep_for(1ms);
}

// Of ranks on hosts of `per_host`, some of which make up a cluster: each has its place under one other, log2(n) below
// the root at most for each kind of step, and each host and cluster but the root's is entered once.
void trees_reach_everybody(int size, int per_host, int hosts_per_cluster, int root) {
  const int per_cluster = per_host * hosts_per_cluster;
  Group group;
  group.size = size;
  for (int rank = 0; rank < size; ++rank) {
    group.memory_leaders.push_back(rank / per_host * per_host);
    group.cluster_leaders.push_back(rank / per_cluster * per_cluster);
  }
  const std::vector<int> order = chain_order(group, root);
  const auto steps = [](int count) { return static_cast<int>(std::bit_width(static_cast<unsigned>(count - 1))); };
  int to_hosts = 0, to_clusters = 0;
  for (int rank = 0; rank < size; ++rank) {
    int above = 0;
    for (int at = rank; at != root; ++above) {
      const TreePlace place(group, order, at);
      CHECK(place.parent() >= 0 && TreePlace(group, order, place.parent()).is_child(at));
      at = place.parent();
    }
    const int clusters = (size + per_cluster - 1) / per_cluster;
    CHECK(above <= steps(clusters) + steps(hosts_per_cluster) + steps(per_host));
    const TreePlace place(group, order, rank);
    CHECK((place.parent() < 0) == (rank == root));
    for (const int child : place.children()) {
      CHECK(TreePlace(group, order, child).parent() == rank);
      to_hosts += child / per_host != rank / per_host;
      to_clusters += child / per_cluster != rank / per_cluster;
    }
  }
  CHECK(to_hosts == (size + per_host - 1) / per_host - 1);
  CHECK(to_clusters == (size + per_cluster - 1) / per_cluster - 1);
}

// The root is through ten broadcasts before anybody else has begun.
void root_ends_before_others_begin(Transport transport, int size) {
  std::atomic<bool> is_through = false;
  run_local(size, transport, [&](Communicator& comm) {
    if (comm.rank() != 1) wait_for(is_through);
    for (int i = 0; i < 10; ++i) {
      auto data = values(comm.rank() + i, 20);
      comm.broadcast(buffer(data, DType::int64), 1)->wait();
      CHECK(data == values(1 + i, 20));
    }
    is_through = true;
    comm.barrier()->wait();
  });
}

// And so are those who send in a reduce.
void senders_end_before_the_root_begins(Transport transport) {
  std::atomic<int> through = 0;
  std::atomic<bool> all_through = false;
  run_local(4, transport, [&](Communicator& comm) {
    if (comm.rank() == 2) wait_for(all_through);
    for (int i = 0; i < 10; ++i) {
      auto data = values(comm.rank() + i, 20);
      comm.reduce(buffer(data, DType::int64), 2, ReduceOp::max)->wait();
      for (std::size_t k = 0; comm.rank() == 2 && k < data.size(); ++k) {
        std::int64_t largest = 0;
        for (int rank = 0; rank < 4; ++rank) largest = std::max(largest, value(rank + i, k));
        CHECK(data[k] == largest);
      }
    }
    if (++through == 3) all_through = true;
  });
}

// What a root may be ahead is bounded, in memory too.
void goes_only_so_far_ahead(Transport transport) {
  std::atomic<int> done = 0;
  run_local(2, transport, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      while (done == 0) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(100ms);
      CHECK(done <= 64);
    }
    for (int i = 0; i < 1000; ++i) {
      std::vector<std::int64_t> data{comm.rank() == 0 ? i : -1};
      comm.broadcast(buffer(data, DType::int64), 0)->wait();
      CHECK(data[0] == i);
      if (comm.rank() == 0) ++done;
    }
  });
}

// Any operations in any order, some at once, with ranks that are late by turns.
void any_order(Transport transport, int size, unsigned seed) {
  run_local(size, transport, [&](Communicator& comm) {
    std::mt19937 shared(seed);
    std::mt19937 own(seed * 100 + static_cast<unsigned>(comm.rank()));
    constexpr std::size_t counts[] = {0, 1, 100, 1000, 9000, 60000};
    for (int i = 0; i < 60; ++i) {
      const auto kind = shared() % 7;
      const std::size_t count = counts[shared() % std::size(counts)];
      const int root = static_cast<int>(shared() % static_cast<unsigned>(size));
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 1000));
      if (kind == 0) check_all_reduce(comm, count);
      if (kind == 1) check_all_gather(comm, count);
      if (kind == 2) {
        check_p2p(comm, count);
        comm.barrier()->wait();  // it takes messages from anyone, and not those of the next one
      }
      if (kind == 3) check_async(comm, count / 10);
      if (kind >= 4) check_rooted(comm, count, root);
    }
  });
}

struct Wrong {
  int rank;
  std::size_t count;
  int root;
};

// Ranks that called something else than a broadcast of `count` words of rank 0 are told, each by its next operation at
// the latest.
void disagreement_is_told(Transport transport, int size, std::size_t count, const Wrong& wrong) {
  std::atomic<int> told = 0;
  std::barrier all(size);
  run_local(size, transport, [&](Communicator& comm) {
    all.arrive_and_wait();  // until every rank has its communicator, which a failure would end
    const bool is_wrong = comm.rank() == wrong.rank;
    std::vector<std::int64_t> data(is_wrong ? wrong.count : count);
    std::string message;
    try {
      comm.broadcast(buffer(data, DType::int64), is_wrong ? wrong.root : 0)->wait();
      comm.barrier()->wait();
    } catch (const HolmesError& error) {
      message = error.what();
    }
    if (message.find("broadcast #") != std::string::npos) ++told;
  });
  CHECK(told == size);
}

// By all others, also by those to whom it would have sent nothing itself.
void the_missing_are_named(int size, int missing) {
  std::atomic<int> told = 0;
  std::atomic<bool> is_over = false;
  run_local(
      size, Transport::tcp,
      [&](Communicator& comm) {
        if (comm.rank() == missing) return wait_for(is_over);
        std::vector<std::int64_t> data(4);
        std::string message;
        try {
          comm.broadcast(buffer(data, DType::int64), 0)->wait();
          comm.barrier()->wait();
        } catch (const HolmesError& error) {
          message = error.what();
        }
        if (++told == size - 1) is_over = true;
        CHECK(contains(message, "rank " + std::to_string(missing)) && contains(message, "has not entered"));
      },
      3s);
}

// A root that leaves at once: what it sent is there.
void a_root_may_leave(Transport transport) {
  run_local(3, transport, [&](Communicator& comm) {
    if (comm.rank() != 0) std::this_thread::sleep_for(100ms);
    for (int i = 0; i < 5; ++i) {
      auto data = values(comm.rank() + i, 500);
      comm.broadcast(buffer(data, DType::int64), 0)->wait();
      CHECK(data == values(i, 500));
    }
  });
}

std::uint64_t sent_to_1(const Communicator& comm) {
  std::uint64_t bytes = 0;
  for (const ConnectionInfo& info : comm.connections())
    if (info.peer == 1 && info.purpose == "collective") bytes += info.sent_bytes;
  return bytes;
}

// Over TCP what ends an operation elsewhere goes with what is sent next; without that it goes soon, be it that its rank
// does nothing more. So a rank that is owed it does not wait for long when it leaves, nor when it is far ahead.
void what_is_kept_goes_soon() {
  constexpr std::size_t count = 20;
  std::atomic<int> senders = 0;
  std::atomic<int> left = 0;
  std::atomic<bool> is_over = false;
  run_local(3, Transport::tcp, [&](Communicator& comm) {
    const auto gather = [&](int root) {
      auto data = values(comm.rank(), count);
      std::vector<std::int64_t> all(3 * count);
      std::vector<Buffer> parts;
      for (std::size_t r = 0; r < 3 && comm.rank() == root; ++r)
        parts.push_back(part(all, r * count, count, DType::int64));
      comm.gather(parts, buffer(data, DType::int64), root)->wait();
      for (std::size_t r = 0; r < parts.size(); ++r)
        for (std::size_t k = 0; k < count; ++k) CHECK(all[r * count + k] == value(static_cast<int>(r), k));
    };
    if (comm.rank() != 0) {
      gather(0);
      ++senders;
    } else {
      while (senders < 2) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(50ms);  // what they sent is there, and this rank need not sleep for it
      const std::uint64_t before = sent_to_1(comm);
      gather(0);
      for (int i = 0; sent_to_1(comm) == before && i < 10'000; ++i) std::this_thread::sleep_for(1ms);
      CHECK(sent_to_1(comm) > before);
    }
    comm.barrier()->wait();
    for (int i = 0; i < 300; ++i) gather(i % 3);
    if (comm.rank() == 0) return wait_for(is_over);
    if (++left == 2) is_over = true;
  });
}

// Whoever looks at the peers meanwhile, so that the I/O thread finds the engine taken just when it would send it.
void what_is_kept_goes_though_another_thread_looks() {
  constexpr int rounds = 8;
  std::atomic<int> senders = 0;
  std::atomic<int> looked = 0;
  run_local(3, Transport::tcp, [&](Communicator& comm) {
    for (int round = 0; round < rounds; ++round) {
      auto data = values(comm.rank(), 20);
      std::vector<std::int64_t> all(60);
      std::vector<Buffer> parts;
      for (std::size_t r = 0; r < 3 && comm.rank() == 0; ++r) parts.push_back(part(all, r * 20, 20, DType::int64));
      const auto gather = [&] { comm.gather(parts, buffer(data, DType::int64), 0)->wait(); };
      if (comm.rank() != 0) {
        gather();
        ++senders;
        while (looked <= round) std::this_thread::sleep_for(1ms);
        continue;
      }
      while (senders < 2 * (round + 1)) std::this_thread::sleep_for(1ms);
      std::this_thread::sleep_for(20ms);
      const std::uint64_t before = sent_to_1(comm);
      gather();
      const auto until = Clock::now() + 30ms;
      while (Clock::now() < until) dynamic_cast<HostCommunicator&>(comm).look_at_peers();
      for (int i = 0; sent_to_1(comm) == before && i < 10'000; ++i) std::this_thread::sleep_for(1ms);
      CHECK(sent_to_1(comm) > before);
      ++looked;
    }
  });
}

// What goes to a rank that is far behind is kept until more of it is to go: no longer than until its sender waits, also
// for another rank, or does nothing more.
void what_has_no_use_yet_is_kept() {
  constexpr int size = 4;
  constexpr int rounds = 30;
  std::atomic<int> ahead = 0;
  std::atomic<int> through = 0;
  run_local(size, Transport::tcp, [&](Communicator& comm) {
    std::mt19937 shared(3);
    for (int round = 0; round < rounds; ++round) {
      const int root = static_cast<int>(shared() % size);
      const int count = 1 + static_cast<int>(shared() % 64);
      const std::size_t words = shared() % 250;
      const bool goes_out = round % 2 == 0;
      const bool goes_on = shared() % 2 == 0;
      const bool is_early = (comm.rank() == root) == goes_out;
      const int early = goes_out ? 1 : size - 1;
      while (!is_early && ahead < early) std::this_thread::sleep_for(100us);
      for (int i = 0; i < count; ++i) {
        auto data = values(comm.rank() + i, words);
        if (goes_out) {
          comm.broadcast(buffer(data, DType::int64), root)->wait();
          CHECK(data == values(root + i, words));
        } else {
          comm.reduce(buffer(data, DType::int64), root, ReduceOp::max)->wait();
          for (std::size_t k = 0; comm.rank() == root && k < words; ++k) {
            std::int64_t largest = 0;
            for (int rank = 0; rank < size; ++rank) largest = std::max(largest, value(rank + i, k));
            CHECK(data[k] == largest);
          }
        }
      }
      if (is_early) ++ahead;
      if (goes_on) check_all_reduce(comm, words);
      ++through;
      while (through < size * (round + 1)) std::this_thread::sleep_for(100us);
      if (comm.rank() == root) ahead = 0;
      comm.barrier()->wait();
    }
  });
}

void ranks_must_agree() {
  const auto store = make_local_store();
  std::atomic<int> refused = 0;
  run_ranks(3, [&](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = 3;
    options.local_completion = rank != 1;
    options.connect_timeout = 20s;
    try {
      make_communicator(store, options);
    } catch (const UsageError& error) {
      const std::string message = error.what();
      if (message.find("of rank 0 and rank 1 only one") != std::string::npos) ++refused;
    }
  });
  CHECK(refused == 3);
}

}  // namespace

int main() {
  for (int size = 2; size <= 30; ++size)
    for (int per_host = 1; per_host <= 4; ++per_host)
      for (int hosts = 1; hosts <= 3; ++hosts)
        for (int root = 0; root < size; ++root) trees_reach_everybody(size, per_host, hosts, root);
  ranks_must_agree();
  the_missing_are_named(3, 2);
  for (const int missing : {0, 4, 5}) the_missing_are_named(6, missing);
  what_is_kept_goes_soon();
  what_has_no_use_yet_is_kept();
  what_is_kept_goes_though_another_thread_looks();
  for (const Transport transport : {Transport::tcp, Transport::automatic}) {
    for (const int size : {4, 10}) root_ends_before_others_begin(transport, size);
    senders_end_before_the_root_begins(transport);
    goes_only_so_far_ahead(transport);
    a_root_may_leave(transport);
    for (const int wrong : {1, 2}) disagreement_is_told(transport, 3, 4, {wrong, 5, 0});
    for (int wrong = 1; wrong < 6; ++wrong) {
      disagreement_is_told(transport, 6, 4, {wrong, 5, 0});
      disagreement_is_told(transport, 6, 4, {wrong, 4, wrong % 5 + 1});
      disagreement_is_told(transport, 6, 3000, {wrong, 3001, 0});   // each on its own thread
      disagreement_is_told(transport, 6, 3000, {wrong, 30000, 0});  // which goes another way
    }
    for (const int size : {2, 4, 7, 9}) any_order(transport, size, static_cast<unsigned>(size));
    for (const int size : {2, 3, 5}) run_local(size, transport, [](Communicator& comm) { check_everything(comm); });
  }
  std::puts("local_completion: all checks passed");
  return 0;
}
