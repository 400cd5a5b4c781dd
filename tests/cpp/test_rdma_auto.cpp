// Transport::automatic on the stand-in for libibverbs: RDMA where the ports of all ranks reach each other, else TCP on
// all of them, and each told why.
#include <atomic>
#include <set>
#include <tuple>

#include "holmes/bootstrap/silent_paths.hpp"
#include "holmes/core/log.hpp"
#include "rdma_checks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// From memory to memory, as what each of six ranks has of an all_reduce of 100,000 numbers.
constexpr std::size_t large_bytes = 768 * 1024;
constexpr const char* direct_bytes = "131072";

using Change = std::function<void(CommunicatorOptions&)>;

void nothing_else(CommunicatorOptions&) {}

CommunicatorOptions automatic(int rank, int size) {
  CommunicatorOptions options = options_of(rank, size);
  options.transport = Transport::automatic;
  return options;
}

void check_transports(const Communicator& comm, const std::string& expected) {
  std::set<std::string> found;
  for (const ConnectionInfo& one : comm.connections())
    if (one.purpose != "control") found.insert(one.transport);
  CHECK(found == std::set<std::string>{expected});
}

// What is small, what is large, and both ways at once.
void check_some(Communicator& comm) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{100000}}) check_all_reduce(comm, count);
  const int next = (comm.rank() + 1) % comm.size(), last = (comm.rank() + comm.size() - 1) % comm.size();
  const Bytes sent = message(large_bytes, static_cast<std::size_t>(comm.rank()));
  Bytes received(sent.size());
  const auto arriving = comm.recv(buffer(received, DType::uint8), last, 0, {.async = true});
  Bytes copy = sent;
  comm.send(buffer(copy, DType::uint8), next, 0, {})->wait();
  arriving->wait();
  CHECK(received == message(large_bytes, static_cast<std::size_t>(last)));
}

// What the ranks write; they and what they are split into use `transport`.
std::string run(int size, const std::string& transport, const Change& change = nothing_else) {
  const std::string told = told_by([&] {
    const auto store = make_local_store();
    run_ranks(size, [&](int rank) {
      CommunicatorOptions options = automatic(rank, size);
      change(options);
      const auto start = Clock::now();
      const auto comm = make_communicator(store, options);
      CHECK(Clock::now() - start < options.connect_timeout);
      check_transports(*comm, transport);
      check_some(*comm);
      const auto part = comm->split(0, -rank);
      check_transports(*part, transport);
      check_some(*part);
    });
    check_nothing_left();
  });
  return told;
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// All ranks end on TCP and say the same, once.
void check_refused(const std::string& why, const Change& change = nothing_else, int size = 3) {
  const std::string told = run(size, "tcp", change);
  const bool is_told = count_of(told, "communicator 'test' uses TCP, not RDMA: ") == static_cast<std::size_t>(size) &&
                       count_of(told, why) == static_cast<std::size_t>(size) &&
                       count_of(told, "uses TCP, not RDMA") == static_cast<std::size_t>(size);
  if (!is_told) std::fprintf(stderr, "not %d times '%s':\n%s\n", size, why.c_str(), told.c_str());
  CHECK(is_told);
  std::printf("%s: ok\n", why.c_str());
}

Change only(int rank, const Change& change) {
  return [=](CommunicatorOptions& options) {
    if (options.rank == rank) change(options);
  };
}

void check_taken() {
  for (int size = 2; size <= 4; ++size) CHECK(count_of(run(size, "rdma"), "RDMA:") == 0);
  const auto two_ports = [](CommunicatorOptions& options) {
    options.rdma_ports.push_back("fake" + std::to_string(2 + options.rank % 2) + ":1");
  };
  run(2, "rdma", two_ports);
  const auto store = make_local_store();
  run_ranks(3, [&](int rank) { check_everything(*make_communicator(store, automatic(rank, 3))); });
  check_nothing_left();
}

// Nobody has a port: nothing is said.
void check_without_ports() {
  CHECK(count_of(run(2, "tcp", [](CommunicatorOptions& options) { options.rdma_ports.clear(); }), "RDMA") == 0);
}

// What every rank sees from what all have told.
void check_unfit_ports() {
  check_refused("rank 1 (host ", only(1, [](auto& options) { options.rdma_ports.clear(); }));
  check_refused(") has no RDMA port", only(2, [](auto& options) { options.rdma_ports.clear(); }));
  check_refused("knows no HCA 'mlx5_7'", only(1, [](auto& options) { options.rdma_ports = {"mlx5_7:1"}; }));
  check_refused("has no port '3'", only(0, [](auto& options) { options.rdma_ports = {"fake0:3"}; }));
  check_refused("each port of one rank talks to one of the other",
                only(1, [](auto& options) { options.rdma_ports.push_back("fake3:1"); }));
  check_refused("uses 8 ports of a rank at most, but 9",
                [](auto& options) { options.rdma_ports.assign(9, "fake0:1"); });
  fake().set("infiniband_device", 1);
  check_refused("fake1:1 (InfiniBand), which cannot talk");
  fake().set("infiniband_device", -1);
  fake().set("port_active", 0);
  check_refused("port fake0:1 is down, not active");
  fake().set("port_active", 1);
}

// What turns out when the ports are used, on some rank.
void check_unfit_paths() {
  fake().set("limited_device", 1);  // rank 1's alone
  fake().set("memory_limit", 65536);
  check_refused("cannot register");
  fake().set("memory_limit", -1);
  fake().set("limited_device", -1);
  for (const long request : {0L, 3L, 11L}) {  // of the twelve proofs of three ranks
    fake().set("fail_after", request);
    check_refused("does not answer over RDMA");
    fake().set("fail_after", -1);
    forget_silent_paths();
  }
  // An HCA that goes on trying for longer than anybody waits: that takes half of the time to connect, whose end `run`
  // checks.
  fake().set("retry_ms", 3'600'000);
  fake().set("fail_after", 0);
  check_refused("did not answer over RDMA", [](auto& options) { options.connect_timeout = 8s; });
  forget_silent_paths();
  fake().set("retry_ms", 50);
  fake().set("fail_after", -1);
}

// A path that was silent is not tried again by this process, whoever asks for nothing, until it has answered.
void check_silent_paths() {
  const auto quickly = [](CommunicatorOptions& options) { options.connect_timeout = 8s; };
  fake().set("retry_ms", 3'600'000);
  for (const auto& [name, value] :
       {std::tuple("die_device", 1L), std::tuple("die_kind", 1L), std::tuple("die_after", 0L)})
    fake().set(name, value);
  long before = fake().posted();
  check_refused("did not answer over RDMA (fake", quickly);
  CHECK(fake().posted() > before);
  fake().set("die_after", -1);
  const auto check_not_tried = [&](int size) {
    before = fake().posted();
    check_refused(" when this process tried that ", quickly, size);
    CHECK(fake().posted() == before);
  };
  for (int group = 0; group < 2; ++group) check_not_tried(3);
  check_not_tried(2);
  fake().set("heal", 0);
  fake().set("retry_ms", 50);
  check_not_tried(3);  // though it would answer
  const auto others = [](CommunicatorOptions& options) {
    options.rdma_ports = {"fake" + std::to_string(2 + options.rank % 2) + ":1"};
  };
  CHECK(count_of(run(2, "rdma", others), "RDMA:") == 0);
  CHECK(count_of(run(3, "rdma", [](auto& options) { options.transport = Transport::rdma; }), "RDMA:") == 0);
  CHECK(count_of(run(3, "rdma"), "RDMA:") == 0);
}

void check_asked_for_otherwise() {
  // Between hosts of one fabric nothing is paced.
  CHECK(count_of(run(3, "rdma", [](auto& options) { options.priority = 1; }), "RDMA:") == 0);
  check_refused("asks for dscp=10", [](auto& options) { options.dscp = 10; });
  check_refused("asks for tls='all', and RDMA has no encryption", [](auto& options) { options.tls = TlsMode::all; });
  for (const char* transport : {"tcp", "shm"}) {
    ::setenv("HOLMES_TRANSPORT", transport, 1);
    check_refused("has HOLMES_TRANSPORT=" + std::string(transport));
  }
  ::setenv("HOLMES_TRANSPORT", "rdma", 1);
  CHECK(count_of(run(2, "rdma"), "RDMA:") == 0);
  ::unsetenv("HOLMES_TRANSPORT");
}

// Ranks 0, 1 and 2 are of one cluster, 3 and 4 of another, 5 alone in the third.
CommunicatorOptions spanning(int rank, Transport transport) {
  CommunicatorOptions options = automatic(rank, 6);
  options.transport = transport;
  options.clusters = {0, 0, 0, 1, 1, 2};
  options.hierarchical_min_bytes = 0;
  options.priority = 1;  // of what goes between clusters
  const int device = (rank < 3 ? 0 : 2) + rank % 2;
  options.rdma_ports = {"fake" + std::to_string(device) + ":1"};
  if (rank == 5) options.rdma_ports.clear();
  return options;
}

// `expected`: what ranks of a cluster use with each other; between clusters it is TCP.
void check_inside(const Communicator& comm, const std::vector<int>& clusters,
                  const std::vector<std::string>& expected) {
  const auto cluster = [&](int rank) { return clusters[static_cast<std::size_t>(rank)]; };
  for (const ConnectionInfo& one : comm.connections()) {
    if (one.purpose == "control") continue;
    const bool is_inside = cluster(one.peer) == cluster(comm.rank());
    CHECK(one.transport == (is_inside ? expected[static_cast<std::size_t>(cluster(comm.rank()))] : "tcp"));
  }
}

std::string run_spanning(Transport transport, const std::vector<std::string>& expected, std::uint64_t min_bytes = 0) {
  const std::string told = told_by([&] {
    const auto store = make_local_store();
    run_ranks(6, [&](int rank) {
      CommunicatorOptions options = spanning(rank, transport);
      options.hierarchical_min_bytes = min_bytes;
      const auto comm = make_communicator(store, options);
      check_inside(*comm, options.clusters, expected);
      check_some(*comm);
      check_operations(*comm, {0, 1, 7, 1000, 8193, 40001}, false);
      check_split(*comm);
      const auto part = comm->split(options.clusters[static_cast<std::size_t>(rank)], rank);  // a cluster
      if (part->size() == 1) return;
      check_transports(*part, expected[static_cast<std::size_t>(options.clusters[static_cast<std::size_t>(rank)])]);
      check_some(*part);
    });
    check_nothing_left();
  });
  return told;
}

void check_clusters() {
  for (const Transport transport : {Transport::automatic, Transport::rdma})
    for (const std::uint64_t min_bytes : {std::uint64_t{0}, never_hierarchical})
      CHECK(count_of(run_spanning(transport, {"rdma", "rdma", "tcp"}, min_bytes), "not RDMA") == 0);
  // One cluster falls back, once, and the others do not.
  fake().set("limited_device", 1);
  fake().set("memory_limit", 65536);
  const std::string told = run_spanning(Transport::automatic, {"tcp", "rdma", "tcp"});
  CHECK(count_of(told, "uses TCP, not RDMA: rank 1 (host ") == 3 && count_of(told, "cannot register") == 3);
  fake().set("memory_limit", -1);
  fake().set("limited_device", -1);
  // Each of another cluster.
  const auto store = make_local_store();
  run_ranks(2, [&](int rank) {
    CommunicatorOptions options = options_of(rank, 2);
    options.clusters = {0, 1};
    const auto comm = make_communicator(store, options);
    check_transports(*comm, "tcp");
    check_some(*comm);
  });
}

// Whoever asks for something else than the others is told, and so are they.
void check_different_wishes() {
  for (const Transport other : {Transport::tcp, Transport::rdma}) {
    const auto store = make_local_store();
    std::atomic<int> told = 0;
    run_ranks(3, [&](int rank) {
      CommunicatorOptions options = automatic(rank, 3);
      if (rank == 1) options.transport = other;
      try {
        make_communicator(store, options);
      } catch (const UsageError& error) {
        check_contains(error.what(), "ask for different transports");
        ++told;
      }
    });
    CHECK(told == 3);
    check_nothing_left();
  }
}

}  // namespace

int main() {
  ::setenv("HOLMES_RDMA_DIRECT_BYTES", direct_bytes, 1);
  set_log_level(LogLevel::info);
  check_taken();
  check_without_ports();
  check_unfit_ports();
  check_unfit_paths();
  check_silent_paths();
  check_asked_for_otherwise();
  check_different_wishes();
  check_clusters();
  std::printf("RDMA by itself: ok\n");
  return 0;
}
