// What C++ users get who name no NIC, and how ranks meet at a Store.
#include "holmes/bootstrap/nic_agreement.hpp"

#include "holmes/discover/nic_selection.hpp"
#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

Nic nic(const std::string& name, NicClass nic_class, const std::string& address, double speed_gbps) {
  Nic made;
  made.name = made.netdev = name;
  made.nic_class = nic_class;
  made.link_layer = "Ethernet";
  made.is_up = made.is_netdev_up = true;
  if (!address.empty()) made.addresses = {{address, 24}};
  made.speed_gbps = speed_gbps;
  if (nic_class != NicClass::ethernet) made.hca = "mlx5_" + name, made.port = 1;
  return made;
}

NicOffer offer(int host, Carrier carrier, double roce_gbps) {
  const std::string last = std::to_string(host + 1);
  NicOffer made = NicSelection{}.offer(
      {nic("roce0", NicClass::roce_v2, "10.1.0." + last, roce_gbps), nic("eth1", NicClass::ethernet, "", 400),
       nic("eth0", NicClass::ethernet, "10.2.0." + last, 100)},
      carrier);
  made.host = made.place = "host" + last;
  return made;
}

void check_choice() {
  for (const Carrier carrier : {Carrier::tcp, Carrier::nccl}) {
    const NicChoice slow = choose_nics({offer(0, carrier, 25), offer(1, carrier, 25)}, carrier);
    CHECK((slow.sockets[1] == std::vector<NicAddress>{{"eth0", "10.2.0.2"}}));
    CHECK(slow.ports.empty());
    const NicChoice fast = choose_nics({offer(0, carrier, 100), offer(1, carrier, 100)}, carrier);
    CHECK((fast.sockets[1] == std::vector<NicAddress>{{"roce0", "10.1.0.2"}}));
    CHECK(fast.ports.size() == (carrier == Carrier::nccl ? 2 : 0));
  }
}

std::string said(int rank) { return "rank " + std::to_string(rank); }

void check_meeting() {
  const auto store = make_local_store();
  run_ranks(5, [&](int rank) {
    const auto fourth = meet(
        {*store, "names", "testing", rank, 5, 10s}, [&](const Seal&) { return said(rank); },
        [](const auto& values, const Seal&) { return Conclusion{values.at(3).bytes}; });
    CHECK(fourth.for_all.bytes == "rank 3");
    try {
      meet(
          {*store, "error", "testing", rank, 5, 10s}, [&](const Seal&) { return said(rank); },
          [](const auto&, const Seal&) -> Conclusion { throw NicError("no NIC", {.peer = 2}); });
      CHECK(false);
    } catch (const NicError& error) {
      CHECK(error.context().rank == rank);
      CHECK(error.context().peer == (rank == 2 ? std::nullopt : std::optional(2)));
    }
  });
  run_ranks(2, [&](int rank) {
    try {
      meet(
          {*store, "absent", "testing", rank, 3, 100ms}, [&](const Seal&) { return said(rank); },
          [](const auto&, const Seal&) { return Conclusion{}; });
      CHECK(false);
    } catch (const TimeoutError& error) {
      CHECK(std::string(error.what()).starts_with("rank 2 of 3 did not take part in testing within 0.100 s"));
      CHECK(error.context().peer == 2);
    }
  });
}

// A rank that was started with another number of ranks is told so, at once.
void check_sizes() {
  const auto check = [](int size, int other_size, const std::string& expected) {
    const auto store = make_local_store();
    run_ranks(2, [&](int rank) {
      try {
        meet(
            {*store, "sizes", "testing", rank, rank == 0 ? size : other_size, 10s},
            [&](const Seal&) { return said(rank); }, [](const auto&, const Seal&) { return Conclusion{}; });
        CHECK(rank == 0 && size == 1);  // nobody else that it waits for
      } catch (const UsageError& error) {
        CHECK(std::string(error.what()).starts_with(expected));
        CHECK(error.context().rank == rank);
      }
    });
  };
  check(3, 2, "rank 1 says that there are 2 ranks, but rank 0 says 3: give every rank the same number (WORLD_SIZE)");
  check(2, 3, "rank 1 says that there are 3 ranks, but rank 0 says 2");
  check(1, 2, "rank 0 says that there are 1 ranks, but rank 1 says 2");
  // One that leads others, with whom it would wait for nobody of the smaller number.
  const auto store = make_local_store();
  run_ranks(2, [&](int place) {
    const int rank = 16 * place;
    try {
      meet(
          {*store, "leads", "testing", rank, place == 0 ? 10 : 40, 300ms}, [&](const Seal&) { return said(rank); },
          [](const auto&, const Seal&) { return Conclusion{}; });
      CHECK(false);
    } catch (const TimeoutError&) {
      CHECK(rank == 0);  // the ranks 1 to 9 did not come
    } catch (const UsageError& error) {
      CHECK(rank == 16 &&
            std::string(error.what()).starts_with("rank 0 says that there are 10 ranks, but rank 16 says 40"));
    }
  });
}

// More ranks than one reads: over a tree, what everybody brings arrives by rank, and to each comes its own.
void check_tree() {
  for (const int size : {16, 17, 33, 300}) {
    const auto store = make_local_store();
    run_ranks(size, [&](int rank) {
      const auto answer = meet(
          {*store, "tree", "testing", rank, size, 30s}, [&](const Seal&) { return said(rank); },
          [&](const auto& values, const Seal&) {
            Conclusion conclusion{std::to_string(values.size())};
            for (std::size_t i = 0; i < values.size(); ++i) {
              CHECK(values[i].bytes == said(static_cast<int>(i)));
              CHECK(values[i].seal.key == "tree/" + std::to_string(i));
              conclusion.for_each.push_back("told " + values[i].bytes);
            }
            return conclusion;
          });
      CHECK(answer.for_all.bytes == std::to_string(size));
      CHECK(answer.own.bytes == "told " + said(rank));
    });
  }
}

// Whoever fails, all raise it; whoever does not come is named, also where others wait for it that wait for each other.
void check_failures_in_a_tree() {
  constexpr int size = 40;
  for (const int failing : {0, 7, 16, 19, 32, 39}) {
    const auto store = make_local_store();
    const auto start = Clock::now();
    run_ranks(size, [&](int rank) {
      try {
        meet(
            {*store, "failing", "testing", rank, size, 30s},
            [&](const Seal&) -> std::string {
              if (rank == failing) throw NicError("no NIC", {.peer = failing});
              return said(rank);
            },
            [](const auto&, const Seal&) { return Conclusion{}; });
        CHECK(false);
      } catch (const NicError& error) {
        CHECK(error.context().rank == rank);
        CHECK(error.context().peer == (rank == failing ? std::nullopt : std::optional(failing)));
      }
    });
    CHECK(Clock::now() - start < 10s);
  }
  for (const int absent : {7, 16, 19, 39}) {
    const auto store = make_local_store();
    run_ranks(size, [&](int rank) {
      if (rank == absent) return;
      try {
        meet(
            {*store, "absent", "testing", rank, size, 500ms}, [&](const Seal&) { return said(rank); },
            [](const auto&, const Seal&) { return Conclusion{}; });
        CHECK(false);
      } catch (const TimeoutError& error) {
        CHECK(std::string(error.what()).starts_with(said(absent) + " of 40 did not take part in testing within "));
        CHECK(error.context().peer == absent);
      }
    });
  }
}

void check_communicator() {
  const auto store = make_local_store();
  run_ranks(2, [&](int rank) {
    const auto communicator = make_communicator(
        store, {.rank = rank, .size = 2, .transport = Transport::tcp, .secret = "the secret of the job"});
    for (const ConnectionInfo& connection : communicator->connections()) CHECK(connection.interface == "lo");
    communicator->barrier()->wait();
  });
}

}  // namespace

int main() {
  check_choice();
  check_meeting();
  check_sizes();
  check_tree();
  check_failures_in_a_tree();
  check_communicator();
}
