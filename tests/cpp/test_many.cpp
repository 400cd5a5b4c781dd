// 64 ranks of one process, every pair connected: 16 communicators of neighbours and 16 across them, every operation in
// all of them at once, over TCP and over shared memory, with operations of several communicators in flight together.
#include <chrono>

#include "collective_checks.hpp"
#include "many_ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr int part_size = 4;

void check_operations(Communicator& comm, std::size_t count) {
  check_all_reduce(comm, count);
  check_reduce_scatter(comm, count);
  check_all_gather(comm, count);
  check_rooted(comm, count, comm.size() / 2);
  check_all_to_all(comm, count);
  check_p2p(comm, count);
  check_async(comm, count / 4);
  comm.barrier()->wait();
}

// Asynchronous sums on all communicators, started in one order and awaited in the other.
void check_in_flight(const std::vector<Communicator*>& comms, std::size_t count) {
  constexpr std::size_t rounds = 3;
  std::vector<std::vector<std::int64_t>> data;
  std::vector<WorkPtr> works;
  for (std::size_t i = 0; i < rounds * comms.size(); ++i)
    data.push_back(values(comms[i % comms.size()]->rank(), count));
  for (std::size_t i = 0; i < data.size(); ++i)
    works.push_back(comms[i % comms.size()]->all_reduce(buffer(data[i], DType::int64), ReduceOp::sum,
                                                        {.timeout = {}, .async = true}));
  for (std::size_t i = data.size(); i-- > 0;) {
    works[i]->wait();
    const int size = comms[i % comms.size()]->size();
    for (std::size_t k = 0; k < count; ++k) CHECK(data[i][k] == sum_value(size, k));
  }
}

void check_rank(Communicator& world) {
  const int rank = world.rank();
  const int part_count = world.size() / part_size;
  check_all_reduce(world, 100);
  const auto neighbours = world.split(rank / part_size, rank);
  const auto strided = world.split(rank % part_count, rank);
  CHECK(neighbours->size() == part_size && neighbours->rank() == rank % part_size);
  CHECK(strided->size() == part_size && strided->rank() == rank / part_count);
  for (const std::size_t count : {std::size_t{5}, std::size_t{10007}}) {
    check_operations(*neighbours, count);
    check_operations(*strided, count);
    check_in_flight({neighbours.get(), strided.get(), &world}, count);
  }
  check_operations(world, 33);
}

void run_world(const char* name, Transport transport, int rank_count) {
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const auto store = make_local_store();
  run_ranks(rank_count, [&](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = rank_count;
    options.transport = transport;
    options.timeout = std::chrono::seconds(120);
    const auto world = make_communicator(store, options);
    if (rank == 0) std::printf("%d ranks over %s: connected after %.1f s\n", rank_count, name, seconds());
    check_rank(*world);
    // Nobody leaves while others still need it.
    world->barrier()->wait();
  });
  std::printf("%d ranks over %s: %d communicators, every operation: ok after %.1f s\n", rank_count, name,
              2 * (rank_count / part_size) + 1, seconds());
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  run_world("TCP", Transport::tcp, ranks_that_fit(64));
  ::setenv("HOLMES_IO_THREADS", "3", 1);
#ifdef __SANITIZE_THREAD__
  // The sanitizer multiplies the mappings, of which vm.max_map_count allows 65,530.
  constexpr int shared_memory_ranks = 32;
#else
  constexpr int shared_memory_ranks = 64;
#endif
  run_world("shared memory", Transport::automatic, ranks_that_fit(shared_memory_ranks));
  return 0;
}
