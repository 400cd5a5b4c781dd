// connect_mesh: ranks are threads over a local store.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <thread>

#include "check.hpp"
#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/mesh.hpp"
#include "holmes/bootstrap/record.hpp"
#include "holmes/core/env.hpp"
#include "holmes/transport/socket.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr std::size_t segment_bytes = 1 << 16;

struct Outcome {
  std::optional<Mesh> mesh;
  std::optional<ErrorKind> kind;
  std::string message;
  ErrorContext context;
};

// Runs `size` ranks; `change` edits a rank's options and may say that it does not take part.
std::vector<Outcome> run_ranks(int size, const CommunicatorOptions& base,
                               const std::function<bool(CommunicatorOptions&)>& change = nullptr,
                               std::shared_ptr<Store> store = make_local_store(),
                               std::function<Store&(int)> store_of = nullptr) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(size));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto options = base;
      options.rank = rank;
      options.size = size;
      if (change && !change(options)) return;
      auto& outcome = outcomes[static_cast<std::size_t>(rank)];
      try {
        outcome.mesh = connect_mesh(store_of ? store_of(rank) : *store, options, segment_bytes);
      } catch (const HolmesError& error) {
        outcome.kind = error.kind();
        outcome.message = error.what();
        outcome.context = error.context();
      }
    });
  }
  threads.clear();
  return outcomes;
}

void send_byte(const MeshSocket& socket, char byte) { CHECK(::send(socket.fd.get(), &byte, 1, 0) == 1); }

char receive_byte(const MeshSocket& socket) {
  char byte = 0;
  for (int tries = 0; tries < 2000; ++tries) {
    if (::recv(socket.fd.get(), &byte, 1, 0) == 1) return byte;
    std::this_thread::sleep_for(1ms);
  }
  return 0;
}

// Every socket of every pair leads to its twin, with the same purpose and rail.
void check_pairs(std::vector<Outcome>& outcomes, bool expect_shm, std::size_t rails) {
  for (const auto& outcome : outcomes) {
    if (!outcome.mesh) std::fprintf(stderr, "%s\n", outcome.message.c_str());
    CHECK(outcome.mesh.has_value());
    if (!outcome.mesh) return;
  }
  const auto size = outcomes.size();
  for (std::size_t a = 0; a < size; ++a) {
    CHECK(outcomes[a].mesh->links.size() == size && outcomes[a].mesh->hosts.size() == size);
    for (std::size_t b = 0; b < a; ++b) {
      auto& left = outcomes[a].mesh->links[b];
      auto& right = outcomes[b].mesh->links[a];
      CHECK(left.peer == static_cast<int>(b) && right.peer == static_cast<int>(a));
      CHECK(left.uses_shared_memory() == expect_shm && right.uses_shared_memory() == expect_shm);
      std::vector<std::pair<MeshSocket*, MeshSocket*>> pairs = {{&left.control, &right.control}};
      CHECK(left.collective.size() == (expect_shm ? 0 : rails) && left.p2p.size() == left.collective.size());
      for (std::size_t i = 0; i < left.collective.size(); ++i) {
        pairs.emplace_back(&left.collective[i], &right.collective[i]);
        pairs.emplace_back(&left.p2p[i], &right.p2p[i]);
      }
      char mark = 1;
      for (const auto& [x, y] : pairs) send_byte(*x, mark++), send_byte(*y, mark++);
      mark = 1;
      for (const auto& [x, y] : pairs) {
        CHECK(receive_byte(*y) == mark++);
        CHECK(receive_byte(*x) == mark++);
        CHECK(x->rail == y->rail && x->info.purpose == y->info.purpose);
        CHECK(x->info.transport == (expect_shm ? "shm" : "tcp") && x->info.host == host_name());
        CHECK((::fcntl(x->fd.get(), F_GETFL) & O_NONBLOCK) != 0);
        if (expect_shm) continue;
        CHECK(x->info.local_address == y->info.remote_address && x->info.remote_address == y->info.local_address);
        CHECK(x->info.interface == "lo" && x->info.local_address.starts_with("127.0.0."));
      }
      if (!expect_shm) continue;
      struct stat status{};
      CHECK(::fstat(left.shared_memory.get(), &status) == 0 && status.st_size == segment_bytes);
      CHECK(::ftruncate(left.shared_memory.get(), 0) != 0 && errno == EPERM);
      auto* mine = static_cast<char*>(::mmap(nullptr, segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                             left.shared_memory.get(), 0));
      auto* theirs = static_cast<char*>(::mmap(nullptr, segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                                               right.shared_memory.get(), 0));
      CHECK(mine != MAP_FAILED && theirs != MAP_FAILED && mine[7] == 0);
      mine[7] = 42;
      CHECK(theirs[7] == 42);
      ::munmap(mine, segment_bytes);
      ::munmap(theirs, segment_bytes);
    }
  }
}

void check_all_fail(const std::vector<Outcome>& outcomes, ErrorKind kind, const std::vector<std::string>& parts,
                    int absent = -1) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (static_cast<int>(rank) == absent) continue;
    const auto& outcome = outcomes[rank];
    CHECK(outcome.kind == kind);
    for (const auto& part : parts) CHECK(contains(outcome.message, part));
  }
}

void test_sizes() {
  for (int size = 1; size <= 8; ++size) {
    for (const auto transport : {Transport::tcp, Transport::automatic, Transport::shm}) {
      auto outcomes = run_ranks(size, {.transport = transport, .connect_timeout = 20s});
      check_pairs(outcomes, transport != Transport::tcp, 1);
    }
  }
  auto rails = run_ranks(3, {.nics = {{"lo", "127.0.0.1"}, {"lo", "127.0.0.2"}}, .transport = Transport::tcp});
  check_pairs(rails, false, 2);
}

void test_many_ranks() {
  auto outcomes = run_ranks(64, {});
  check_pairs(outcomes, true, 1);
  outcomes.clear();
  // Several communicators at once, over one store.
  const auto store = make_local_store();
  std::vector<std::jthread> groups;
  for (int i = 0; i < 4; ++i) {
    groups.emplace_back([&store, i] {
      const CommunicatorOptions options{.name = "group" + std::to_string(i),
                                        .transport = i % 2 == 0 ? Transport::tcp : Transport::automatic};
      auto group = run_ranks(5, options, nullptr, store);
      check_pairs(group, i % 2 != 0, 1);
    });
  }
}

void test_secrets() {
  const auto started = Clock::now();
  for (const auto transport : {Transport::tcp, Transport::automatic}) {
    auto good = run_ranks(3, {.transport = transport, .secret = "open sesame"});
    check_pairs(good, transport != Transport::tcp, 1);
    auto wrong = run_ranks(3, {.transport = transport, .connect_timeout = 20s, .secret = "open sesame"},
                           [](auto& options) {
                             if (options.rank == 2) options.secret = "open barley";
                             return true;
                           });
    check_all_fail(wrong, ErrorKind::protocol, {"rank 2", "secrets differ", "HOLMES_SECRET"});
  }
  const auto one = run_ranks(2, {}, [](auto& options) {
    if (options.rank == 1) options.secret = "alone";
    return true;
  });
  check_all_fail(one, ErrorKind::usage, {"rank 1", "only one of them was given a secret"});
  CHECK(Clock::now() - started < 20s);
}

void test_wrong_arguments() {
  const auto nic = run_ranks(3, {.transport = Transport::tcp}, [](auto& options) {
    if (options.rank == 1) options.nics = {{"nosuch0", "10.0.0.1"}};
    return true;
  });
  check_all_fail(nic, ErrorKind::nic, {"rank 1", "nosuch0", "lo", "choose"});
  const auto address = run_ranks(2, {.nics = {{"lo", "192.0.2.1"}}});
  check_all_fail(address, ErrorKind::nic, {"lo", "192.0.2.1", "127.0.0.1"});
  const auto text = run_ranks(2, {.nics = {{"lo", "localhost"}}});
  check_all_fail(text, ErrorKind::nic, {"localhost", "not a numeric"});
  const auto count = run_ranks(2, {.nics = {{"lo", "127.0.0.1"}}}, [](auto& options) {
    if (options.rank == 1) options.nics.push_back({"lo", "127.0.0.2"});
    return true;
  });
  check_all_fail(count, ErrorKind::usage, {"rank 0", "rank 1", "1 and 2 NICs"});
  const auto transport = run_ranks(2, {}, [](auto& options) {
    if (options.rank == 1) options.transport = Transport::tcp;
    return true;
  });
  check_all_fail(transport, ErrorKind::usage, {"different transports"});
  auto store = make_local_store();
  CHECK(contains(message_of<UsageError>([&] { connect_mesh(*store, {.rank = 2, .size = 2}, segment_bytes); }), "RANK"));
}

void test_missing_rank() {
  for (const int absent : {0, 1, 3}) {
    const auto started = Clock::now();
    const auto outcomes =
        run_ranks(4, {.connect_timeout = 1s}, [absent](auto& options) { return options.rank != absent; });
    CHECK(Clock::now() - started < 3s);
    check_all_fail(outcomes, ErrorKind::timeout, {"rank " + std::to_string(absent), "did not show up within 1 s"},
                   absent);
  }
  // A rank that said where it listens, and then died.
  const auto started = Clock::now();
  auto store = make_local_store();
  RankRecord record;
  record.host = "b1";
  record.machine = machine_identity();
  record.user = std::to_string(::getuid());
  record.shared_memory_bytes = segment_bytes;
  record.transport = Transport::tcp;
  record.rails = {{"lo", "127.0.0.1", 1, 1}};
  store->set("world/rank/1", encode(record));
  const auto died = run_ranks(3, {.transport = Transport::tcp, .connect_timeout = 2s},
                              [](auto& options) { return options.rank != 1; }, store);
  check_all_fail(died, ErrorKind::unreachable, {"rank 1 (host b1)", "rank 2", "NIC lo", "127.0.0.1:1", "refused"}, 1);
  CHECK(Clock::now() - started < 4s);
}

void test_other_version() {
  auto store = make_local_store();
  store->set("world/rank/1", "6:holmes1:94:rank");
  const auto outcomes = run_ranks(2, {}, [](auto& options) { return options.rank == 0; }, store);
  check_all_fail(outcomes, ErrorKind::protocol, {"rank 1", "version 9", "version 1"}, 1);
  store = make_local_store();
  store->set("world/rank/1", "6:holmes1:199999999999:rank");
  const auto garbage = run_ranks(2, {}, [](auto& options) { return options.rank == 0; }, store);
  check_all_fail(garbage, ErrorKind::protocol, {"rank 1", "makes no sense"}, 1);
}

int connect_stranger(std::uint16_t port) {
  const auto address = SocketAddress::parse("127.0.0.1", port);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(::connect(fd, address.data(), address.length()) == 0);
  return fd;
}

bool is_dropped(int fd, std::chrono::seconds timeout) {
  const timeval limit{timeout.count(), 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  char bytes[256];
  ssize_t got = 0;
  do {
    got = ::recv(fd, bytes, sizeof(bytes), 0);
  } while (got > 0);
  return got == 0 || errno == ECONNRESET;
}

// Lets nobody read before `go`.
class LateStore final : public Store {
public:
  explicit LateStore(std::shared_ptr<Store> base) : base_(std::move(base)) {}
  void set(const std::string& key, const std::string& value) override { base_->set(key, value); }
  std::string get(const std::string& key, Duration timeout) override {
    base_->wait("go", 30s);
    return base_->get(key, timeout);
  }
  void wait(const std::string& key, Duration timeout) override { base_->wait(key, timeout); }

private:
  std::shared_ptr<Store> base_;
};

// Strangers come while rank 0 waits for a late rank 2; the mesh stands all the same, and its ports are closed then.
void test_strangers() {
  const auto store = make_local_store();
  LateStore late(store);
  std::uint16_t port = 0;
  std::jthread strangers([&] {
    const auto record = decode_rank(store->get("world/rank/0", 10s), "rank 0");
    port = record.rails.at(0).port;
    Hello hello;
    hello.rank = 1;
    hello.group = group_hash("world");
    std::vector<int> fds;
    const auto say = [&](const std::string& text) {
      fds.push_back(connect_stranger(port));
      CHECK(::send(fds.back(), text.data(), text.size(), MSG_NOSIGNAL) >= 0);
    };
    say("GET / HTTP/1.1\r\n\r\n");
    say(std::string(1 << 16, '\xff'));
    say(std::string("HOLMES\r\n") + std::string(100, '\x7f'));
    auto changed = hello;
    changed.version = 7;
    say(changed.encode());
    changed = hello, changed.rank = 77;
    say(changed.encode());
    changed = hello, changed.rank = 0;
    say(changed.encode());
    changed = hello, changed.rail = 9;
    say(changed.encode());
    changed = hello, changed.purpose = static_cast<Purpose>(200);
    say(changed.encode());
    changed = hello, changed.group = group_hash("other");
    say(changed.encode());
    say(hello.encode() + std::string(32, 'x'));  // a wrong proof
    const auto last = fds.size();
    for (int i = 0; i < 300; ++i) fds.push_back(connect_stranger(port));  // more than are kept; silent
    for (std::size_t i = 0; i < last; ++i) {
      if (i != 3) CHECK(is_dropped(fds[i], 10s));  // the other version gets an answer and may stay a while
    }
    CHECK(is_dropped(fds[last], 10s));
    std::this_thread::sleep_for(100ms);
    store->set("go", "");
    std::this_thread::sleep_for(500ms);
    for (const int fd : fds) ::close(fd);
  });
  auto outcomes = run_ranks(
      3, {.transport = Transport::tcp}, nullptr, store, [&](int rank) -> Store& { return rank == 2 ? late : *store; });
  strangers.join();
  check_pairs(outcomes, false, 1);
  const auto address = SocketAddress::parse("127.0.0.1", port);
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(fd.get(), address.data(), address.length()) != 0 && errno == ECONNREFUSED);
}

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) std::fprintf(stderr, "'%s' failed\n", command.c_str()), ++failures;
}

// A network namespace of its own, as a descriptor; the calling process must be root in its user namespace.
int make_namespace() {
  int fd = -1;
  std::jthread([&fd] {
    CHECK(::unshare(CLONE_NEWNET) == 0);
    fd = ::open("/proc/thread-self/ns/net", O_RDONLY);  // inherited by the commands that run() starts
    run("ip link set lo up");
  }).join();
  return fd;
}

// Two emulated hosts, joined by a veth pair. Runs in a user namespace: see test_namespaces.
void test_in_namespace() {
  const int nodes[] = {make_namespace(), make_namespace()};
  const auto enter = [&](int node) { CHECK(::setns(nodes[node], CLONE_NEWNET) == 0); };
  const auto on_node = [&](int node, const std::string& command) {
    std::jthread([&] { enter(node), run(command); }).join();
  };
  on_node(0, "ip link add a0 type veth peer name b0 netns /proc/self/fd/" + std::to_string(nodes[1]));
  on_node(0, "ip addr add 10.1.0.1/24 dev a0 && ip link set a0 up && ip link add down0 type dummy");
  on_node(1, "ip addr add 10.1.0.2/24 dev b0 && ip addr add 10.2.0.1/24 dev b0 && ip link set b0 up");
  const auto place = [&](const std::vector<int>& node_of, const std::vector<NicBinding>& nics) {
    return [=](CommunicatorOptions& options) {
      const auto rank = static_cast<std::size_t>(options.rank);
      enter(node_of[rank]);
      if (!nics.empty()) options.nics = {nics[rank]};
      return true;
    };
  };
  const NicBinding a0{"a0", "10.1.0.1"}, b0{"b0", "10.1.0.2"}, elsewhere{"b0", "10.2.0.1"};

  auto good = run_ranks(4, {.transport = Transport::tcp}, place({0, 1, 0, 1}, {a0, b0, a0, b0}));
  for (const auto& outcome : good) CHECK(outcome.mesh && outcome.message.empty());
  const auto check_link = [&](std::size_t from, std::size_t to, bool device_bound) {
    const auto& link = good[from].mesh->links[to];
    for (const auto* socket : {&link.control, &link.collective[0], &link.p2p[0]}) {
      CHECK(socket->info.interface == (from % 2 == 0 ? "a0" : "b0"));
      CHECK(socket->info.local_address.starts_with(from % 2 == 0 ? "10.1.0.1:" : "10.1.0.2:"));
      CHECK(socket->info.device_bound == device_bound);
    }
  };
  if (good[3].mesh) check_link(0, 1, true), check_link(1, 0, true), check_link(3, 0, true), check_link(2, 0, false);
  good = run_ranks(3, {}, place({0, 1, 0}, {a0, b0, a0}));
  CHECK(good[2].mesh && good[2].mesh->links[0].uses_shared_memory() && !good[2].mesh->links[1].uses_shared_memory());

  const auto started = Clock::now();
  auto bad = run_ranks(3, {.transport = Transport::tcp}, place({0, 0, 1}, {a0, a0, elsewhere}));
  check_all_fail(bad, ErrorKind::unreachable,
                 {"rank 2 (host", "NIC b0: 10.2.0.1 -> 10.1.0.1:", "cannot be reached", "unreachable (errno 101)"});
  CHECK(Clock::now() - started < 10s);  // long before the deadline
}
void unused() {
}

// Re-runs this program in a user namespace.
void test_namespaces() {
  if (std::system("unshare -Urn ip link set lo up 2>/dev/null") != 0) {
    std::puts("namespaces: skipped, this system does not permit user namespaces (or has no ip command)");
    return;
  }
  run("unshare -Urn /proc/" + std::to_string(::getpid()) + "/exe in_namespace");
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, void (*)()> tests = {{"sizes", test_sizes},
                                                   {"many_ranks", test_many_ranks},
                                                   {"secrets", test_secrets},
                                                   {"wrong_arguments", test_wrong_arguments},
                                                   {"missing_rank", test_missing_rank},
                                                   {"other_version", test_other_version},
                                                   {"strangers", test_strangers}};
  for (const auto& [name, test] : tests) {
    if (argc > 1 && name != argv[1]) continue;
    const auto started = Clock::now();
    test();
    std::printf("%s: %.2f s\n", name.c_str(), std::chrono::duration<double>(Clock::now() - started).count());
  }
  return result("test_mesh");
}
