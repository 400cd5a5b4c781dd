// connect_mesh between emulated hosts: network namespaces joined by veth pairs, made without root.
#include "mesh_ranks.hpp"
#include "namespaces.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// Two emulated hosts, joined by a veth pair; node 1 has another NIC that leads to a third host only. Runs in a user
// namespace.
void test_in_namespace() {
  const int nodes[] = {make_namespace(), make_namespace(), make_namespace()};
  const auto enter = [&](int node) { CHECK(::setns(nodes[node], CLONE_NEWNET) == 0); };
  const auto on_node = [&](int node, const std::string& command) {
    std::thread([&] { enter(node), run(command); }).join();
  };
  on_node(0, "ip link add a0 type veth peer name b0 netns /proc/self/fd/" + std::to_string(nodes[1]));
  on_node(0, "ip addr add 10.1.0.1/24 dev a0 && ip link set a0 up && ip link add down0 type veth peer name down1");
  on_node(1, "ip addr add 10.1.0.2/24 dev b0 && ip link set b0 up");
  on_node(1, "ip link add c0 type veth peer name d0 netns /proc/self/fd/" + std::to_string(nodes[2]));
  on_node(1, "ip addr add 10.2.0.1/24 dev c0 && ip link set c0 up");
  on_node(2, "ip link set d0 up");
  const auto place = [&](const std::vector<int>& node_of, const std::vector<NicBinding>& nics) {
    return [=](CommunicatorOptions& options) {
      const auto rank = static_cast<std::size_t>(options.rank);
      enter(node_of[rank]);
      if (!nics.empty()) options.nics = {nics[rank]};
      return true;
    };
  };
  const NicBinding a0{"a0", "10.1.0.1"}, b0{"b0", "10.1.0.2"}, elsewhere{"c0", "10.2.0.1"};

  auto good = run_ranks(4, {.transport = Transport::tcp}, place({0, 1, 0, 1}, {a0, b0, a0, b0}));
  for (const auto& outcome : good) {
    CHECK(outcome.mesh.has_value());
    std::fputs(outcome.message.c_str(), stderr);
  }
  const auto check_link = [&](std::size_t from, std::size_t to, bool device_bound) {
    const auto& connections = good[from].mesh->peers[to];
    for (const auto* socket : {&connections.control[0], &connections.collective[0], &connections.p2p[0]}) {
      CHECK(socket->info.interface == (from % 2 == 0 ? "a0" : "b0"));
      CHECK(socket->info.local_address.starts_with(from % 2 == 0 ? "10.1.0.1:" : "10.1.0.2:"));
      CHECK(socket->info.device_bound == device_bound);
    }
  };
  if (good[3].mesh) check_link(0, 1, true), check_link(1, 0, true), check_link(3, 0, true), check_link(2, 0, false);
  good = run_ranks(3, {}, place({0, 1, 0}, {a0, b0, a0}));
  CHECK(good[2].mesh && good[2].mesh->peers[0].uses_shared_memory() && !good[2].mesh->peers[1].uses_shared_memory());

  auto started = Clock::now();
  auto bad = run_ranks(3, {.transport = Transport::tcp}, place({0, 0, 1}, {a0, a0, elsewhere}));
  check_all_fail(bad, ErrorKind::unreachable,
                 {"rank 2 (host", "is cut off from more than one rank: ", "rank 0 (host",
                  "cannot be reached from rank 2", "NIC c0: 10.2.0.1 -> 10.1.0.1:", "(errno 113)"});
  CHECK(bad[0].context.rank == 2 && !bad[0].context.peer && bad[0].context.nic == "c0" &&
        bad[0].context.system_errno == EHOSTUNREACH);
  CHECK(Clock::now() - started < 10s);  // long before the deadline
  // Over the NICs of their cluster, though the shared ones would do.
  bad = run_ranks(2, {.clusters = {0, 0}, .transport = Transport::tcp}, [&](CommunicatorOptions& options) {
    place({0, 1}, {a0, b0})(options);
    options.cluster_nics = {options.rank == 0 ? a0 : elsewhere};
    return true;
  });
  check_all_fail(bad, ErrorKind::unreachable, {"rank 0", "rank 1", "NIC c0: 10.2.0.1 -> 10.1.0.1:"});
  CHECK(bad[0].context.nic == "c0");
  bad = run_ranks(2, {.clusters = {0, 0}, .transport = Transport::tcp}, [&](CommunicatorOptions& options) {
    place({0, 1}, {a0, b0})(options);
    options.cluster_nics = {{"lo", "127.0.0.1"}};
    return true;
  });
  check_all_fail(bad, ErrorKind::nic, {"different hosts", "rank 0", "rank 1", "lo 127.0.0.1"});
  // Where packets are lost without a word, the deadline ends it.
  on_node(2, "ip addr add 10.1.0.1/24 dev d0 && ip route add blackhole 10.2.0.0/24");
  started = Clock::now();
  bad = run_ranks(3, {.transport = Transport::tcp, .connect_timeout = 2s}, place({0, 0, 1}, {a0, a0, elsewhere}));
  check_all_fail(bad, ErrorKind::unreachable, {"rank 0", "rank 2", "10.2.0.1 -> 10.1.0.1", "within 2 s"});
  CHECK(Clock::now() - started < 4s);

  bad = run_ranks(2, {}, place({0, 1}, {}));
  check_all_fail(bad, ErrorKind::usage, {"different hosts", "rank 0", "rank 1", "given no NIC"});
  bad = run_ranks(2, {}, place({0, 1}, {{"lo", "127.0.0.1"}, b0}));
  check_all_fail(bad, ErrorKind::nic, {"different hosts", "rank 0", "127.0.0.1"});
  bad = run_ranks(2, {.transport = Transport::shm}, place({0, 1}, {}));
  check_all_fail(bad, ErrorKind::usage, {"cannot share memory", "rank 0", "rank 1"});
  bad = run_ranks(2, {}, place({0, 1}, {a0, a0}));
  check_all_fail(bad, ErrorKind::nic, {"rank 1", "no network interface 'a0'", "b0"});
  bad = run_ranks(2, {}, place({0, 1}, {{"down0", "10.1.0.1"}, b0}));
  check_all_fail(bad, ErrorKind::nic, {"rank 0", "'down0' is down", "ip link set down0 up"});
  bad = run_ranks(2, {}, place({0, 1}, {{"lo", "10.1.0.1"}, b0}));
  check_all_fail(bad, ErrorKind::nic, {"rank 0", "the address is on a0"});
  for (const int node : nodes) ::close(node);
}

void test_namespaces() { run_in_user_namespace("in_namespace"); }

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "in_namespace") {
    test_in_namespace();
    return result("test_mesh_namespaces in_namespace");
  }
  return run_tests("test_mesh_namespaces", {{"namespaces", test_namespaces}}, argc, argv);
}
