// connect_mesh: what must stand, and what must fail, with which error and when.
#include <unistd.h>

#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/discover/host.hpp"
#include "many_ranks.hpp"
#include "mesh_ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

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
  auto outcomes = run_ranks(ranks_that_fit(64), {});
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

// A store that many communicators are made with does not grow by their records; and who comes too late is told at once.
void test_what_stays_in_the_store() {
  const auto store = make_local_store();
  const auto is_there = [&](const std::string& key) {
    try {
      store->wait("world/" + key, 1ms);
      return true;
    } catch (const TimeoutError&) {
      return false;
    }
  };
  const int size = 5;
  auto outcomes = run_ranks(size, {.transport = Transport::tcp, .connect_timeout = 20s}, nullptr, store);
  check_pairs(outcomes, false, 1);
  for (int rank = 0; rank < size; ++rank)
    for (const char* what : {"rank/", "ok/"}) CHECK(!is_there(what + std::to_string(rank)));
  CHECK(store->get("world/records", 1ms).size() < 500);

  const auto started = Clock::now();
  const auto late = run_ranks(
      size, {.transport = Transport::tcp, .connect_timeout = 60s}, [](auto& options) { return options.rank == 2; },
      store);
  CHECK(late[2].kind == ErrorKind::usage);
  CHECK(contains(late[2].message, "is set up already") && contains(late[2].message, "a rank of its own"));
  CHECK(Clock::now() - started < 20s);

  // Where it fails everything stays, for who comes later.
  const auto failed = run_ranks(
      2, {.name = "failed", .transport = Transport::tcp, .connect_timeout = 20s},
      [](auto& options) {
        if (options.rank == 1) options.secret = "known to this rank alone";
        return true;
      },
      store);
  check_all_fail(failed, ErrorKind::usage, {"rank 1"});
  store->wait("failed/records", 1ms);
  store->wait("failed/rank/1", 1ms);
}

void test_secrets() {
  const auto started = Clock::now();
  for (const auto transport : {Transport::tcp, Transport::automatic}) {
    auto good = run_ranks(3, {.transport = transport, .secret = "open sesame, open sesame"});
    check_pairs(good, transport != Transport::tcp, 1);
    auto wrong = run_ranks(3, {.transport = transport, .connect_timeout = 20s, .secret = "open sesame, open sesame"},
                           [](auto& options) {
                             if (options.rank == 2) options.secret = "open barley, open barley";
                             return true;
                           });
    check_all_fail(wrong, ErrorKind::protocol, {"rank 2", "secrets differ", "HOLMES_SECRET"});
  }
  const auto one = run_ranks(2, {}, [](auto& options) {
    if (options.rank == 1) options.secret = "known to this rank alone";
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

// Ranks 0 and 1 share two rails, 2 and 3 another NIC, rank 4 is alone; all share 127.0.0.1.
const std::vector<int> clusters = {5, 5, 3, 3, 9};

bool give_cluster_nics(CommunicatorOptions& options) {
  options.clusters = clusters;
  options.nics = {{"lo", "127.0.0.1"}};
  const std::vector<NicBinding> first = {{"lo", "127.0.1.1"}, {"lo", "127.0.1.2"}};
  const std::vector<NicBinding> second = {{"lo", "127.0.2.1"}};
  options.cluster_nics = options.rank < 2 ? first : options.rank < 4 ? second : std::vector<NicBinding>{};
  return true;
}

void test_nics_of_pairs() {
  auto outcomes = run_ranks(5, {.transport = Transport::tcp, .connect_timeout = 20s}, give_cluster_nics);
  for (const auto& outcome : outcomes) {
    if (!outcome.mesh) std::fprintf(stderr, "%s\n", outcome.message.c_str());
    CHECK(outcome.mesh.has_value());
    if (!outcome.mesh) return;
  }
  for (std::size_t a = 0; a < outcomes.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      auto& left = outcomes[a].mesh->peers[b];
      auto& right = outcomes[b].mesh->peers[a];
      const bool inside = clusters[a] == clusters[b];
      const std::size_t rails = inside && a < 2 ? 2 : 1;
      const std::string network = !inside ? "127.0.0." : a < 2 ? "127.0.1." : "127.0.2.";
      for (const auto purpose : {&PeerConnections::control, &PeerConnections::collective, &PeerConnections::p2p}) {
        CHECK((left.*purpose).size() == rails && (right.*purpose).size() == rails);
        for (std::size_t i = 0; i < rails; ++i) {
          const auto& x = (left.*purpose)[i];
          const auto& y = (right.*purpose)[i];
          CHECK(x.rail == y.rail && x.info.purpose == y.info.purpose);
          CHECK(x.info.local_address == y.info.remote_address && x.info.remote_address == y.info.local_address);
          CHECK(x.info.local_address.starts_with(network + std::to_string(i + 1) + ":"));
          send_byte(x, static_cast<char>(i + 1)), send_byte(y, static_cast<char>(i + 3));
          CHECK(receive_byte(y) == static_cast<char>(i + 1) && receive_byte(x) == static_cast<char>(i + 3));
        }
      }
    }
  }
  auto shared = run_ranks(4, {}, [](auto& options) {
    give_cluster_nics(options);
    options.clusters.pop_back();
    return true;
  });
  check_pairs(shared, true, 1);
}

void test_wrong_clusters() {
  const auto count = run_ranks(5, {.transport = Transport::tcp}, [](auto& options) {
    give_cluster_nics(options);
    if (options.rank == 3) options.cluster_nics.push_back({"lo", "127.0.2.2"});
    return true;
  });
  check_all_fail(count, ErrorKind::usage, {"rank 2", "rank 3", "1 and 2 NICs inside their cluster"});
  const auto nic = run_ranks(5, {.transport = Transport::tcp}, [](auto& options) {
    give_cluster_nics(options);
    if (options.rank == 3) options.cluster_nics = {{"nosuch0", "10.0.0.1"}};
    return true;
  });
  check_all_fail(nic, ErrorKind::nic, {"rank 3", "nosuch0", "choose"});
  const auto list = run_ranks(5, {.transport = Transport::tcp}, [](auto& options) {
    give_cluster_nics(options);
    if (options.rank == 3) options.clusters[1] = 4;
    return true;
  });
  check_all_fail(list, ErrorKind::usage, {"rank 1", "in cluster 5", "rank 3", "in cluster 4", "same list"});
  const auto none = run_ranks(5, {.transport = Transport::tcp}, [](auto& options) {
    if (options.rank != 3) give_cluster_nics(options);
    return true;
  });
  check_all_fail(none, ErrorKind::usage, {"rank 3", "only one of them was given the ranks' clusters"});
  const auto never = run_ranks(5, {.transport = Transport::tcp}, [](auto& options) {
    give_cluster_nics(options);
    if (options.rank == 3) options.hierarchical_min_bytes = never_hierarchical;
    return true;
  });
  check_all_fail(never, ErrorKind::usage, {"rank 3", "never to run hierarchically"});
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
  RankInfo record;
  record.host = "b1";
  record.machine = machine_identity();
  record.user = std::to_string(::getuid());
  record.shared_memory_bytes = segment_bytes;
  record.transport = Transport::tcp;
  record.rails = {{"lo", "127.0.0.1", 1, 1}};
  store->set("world/rank/1", encode(record, {"", "world/rank/1"}));
  const auto died = run_ranks(
      3, {.transport = Transport::tcp, .connect_timeout = 2s}, [](auto& options) { return options.rank != 1; }, store);
  check_all_fail(died, ErrorKind::unreachable, {"rank 1 (host b1)", "rank 2", "NIC lo", "127.0.0.1:1", "refused"}, 1);
  CHECK(Clock::now() - started < 4s);
}

// It said where it listens, and died before it passed on what the others said.
void test_rank_0_died() {
  const auto started = Clock::now();
  auto store = make_local_store();
  store->set("world/rank/0", encode(record_of_other(1), {"", "world/rank/0"}));
  const auto died = run_ranks(
      3, {.transport = Transport::tcp, .connect_timeout = 2s}, [](auto& options) { return options.rank != 0; }, store);
  check_all_fail(died, ErrorKind::timeout, {"rank 0 (host b1)", "did not pass on", "2 s"}, 0);
  for (const int rank : {1, 2}) CHECK(died[static_cast<std::size_t>(rank)].context.host == "b1");
  CHECK(Clock::now() - started < 5s);
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests("test_mesh",
                   {{"sizes", test_sizes},
                    {"many_ranks", test_many_ranks},
                    {"what_stays_in_the_store", test_what_stays_in_the_store},
                    {"secrets", test_secrets},
                    {"wrong_arguments", test_wrong_arguments},
                    {"nics_of_pairs", test_nics_of_pairs},
                    {"wrong_clusters", test_wrong_clusters},
                    {"missing_rank", test_missing_rank},
                    {"rank_0_died", test_rank_0_died}},
                   argc, argv);
}
