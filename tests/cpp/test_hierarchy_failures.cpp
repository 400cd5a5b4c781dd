// What goes wrong over clusters: ranks that disagree, that come late, that die, that abort, in the middle of operations
// of several parts. Every rank raises, soon, the error of the right type with ranks as the whole group numbers them.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <numeric>

#include "clusters.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

std::size_t count = 0;  // of several pieces, or of one that the calling thread carries out itself

// Memory that lives as long as an operation uses it.
Buffer owned_buffer() {
  const auto memory = std::make_shared<std::vector<float>>(count);
  return {memory->data(), count, DType::float32, memory};
}

// Runs `call`, which must throw an `Error`.
template <class Error>
Error raised(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("no error where one is due");
}

void all_reduce(Communicator& comm, std::size_t elements, DType dtype = DType::float32, ReduceOp op = ReduceOp::sum,
                CallOptions call = {}) {
  std::vector<double> memory(elements);
  comm.all_reduce({memory.data(), elements, dtype, nullptr}, op, std::move(call))->wait();
}

// Rank 3 calls something else than the others; all of them hear of it.
void check_mismatch(const std::function<void(Communicator&)>& other) {
  run_clusters({0, 0, 1, 1}, count, [&](Communicator& comm) {
    const auto error = raised<MismatchError>([&] {
      all_reduce(comm, count);  // a slow rank may still be in it when it hears what the fast ones did next
      if (comm.rank() == 3) {
        other(comm);
      } else {
        all_reduce(comm, count);
      }
    });
    if (comm.rank() != 3) CHECK(contains(error.what(), "all_reduce"));
    CHECK(comm.is_dead());
    // Dead, and says why.
    CHECK(contains(raised<MismatchError>([&] { comm.barrier({})->wait(); }).what(), "is dead, make a new one"));
  });
}

void check_mismatches() {
  check_mismatch([](Communicator& comm) { all_reduce(comm, count + 1); });
  check_mismatch([](Communicator& comm) { all_reduce(comm, 10); });  // flat on this rank
  check_mismatch([](Communicator& comm) { all_reduce(comm, count, DType::float32, ReduceOp::max); });
  check_mismatch([](Communicator& comm) { all_reduce(comm, count, DType::int32); });
  check_mismatch([](Communicator& comm) {
    all_reduce(comm, count, DType::float32, ReduceOp::sum,
               {.compression = std::make_shared<Compression>(Compression::Settings{})});
  });
  check_mismatch([](Communicator& comm) { comm.barrier({})->wait(); });
  check_mismatch([](Communicator& comm) {
    std::vector<float> data(count);
    comm.broadcast(buffer(data, DType::float32), 0, {})->wait();
  });
  std::printf("mismatches: ok\n");
}

void check_usage() {
  run_clusters({0, 0, 1, 1}, 0, [](Communicator& comm) {
    const CallOptions compressed{.compression = std::make_shared<Compression>(
                                     Compression::Settings{.codec = Codec::int8, .error_feedback = true})};
    raised<UsageError>([&] { all_reduce(comm, 10, DType::float64, ReduceOp::sum, compressed); });
    raised<UsageError>([&] { all_reduce(comm, 10, DType::float32, ReduceOp::max, compressed); });
    raised<UsageError>([&] { comm.barrier(compressed); });
    raised<UsageError>([&] { all_reduce(comm, 10, DType::float32, ReduceOp::band); });
    std::vector<float> data(10);
    raised<UsageError>([&] { comm.broadcast(buffer(data, DType::float32), 4, {}); });
    raised<UsageError>([&] { comm.all_gather({}, buffer(data, DType::float32), {}); });
    all_reduce(comm, 1000, DType::float32, ReduceOp::sum, compressed);
    raised<UsageError>([&] { all_reduce(comm, 2000, DType::float32, ReduceOp::sum, compressed); });  // other residual
    compressed.compression->reset();
    all_reduce(comm, 2000, DType::float32, ReduceOp::sum, compressed);
    all_reduce(comm, 3'000'000);  // usable still
  });
  run_communicators(2, Transport::tcp, [](Communicator& comm) {
    raised<UsageError>([&] {
      all_reduce(comm, 10, DType::float32, ReduceOp::sum,
                 {.compression = std::make_shared<Compression>(Compression::Settings{})});
    });
    all_reduce(comm, 10);
  });
  // Different thresholds.
  const auto store = make_local_store();
  run_ranks(4, [&](int rank) {
    const auto options = cluster_options({0, 0, 1, 1}, rank, static_cast<std::uint64_t>(rank / 3));
    const auto error = raised<UsageError>([&] { make_communicator(store, options); });
    CHECK(contains(error.what(), "rank 0 wants operations hierarchical from 0 bytes on, rank 3 from 1"));
  });
  std::printf("usage errors: ok\n");
}

// A NIC inside one cluster is missing: the ranks of the other one do not wait in vain.
void check_setup() {
  const auto store = make_local_store();
  run_ranks(4, [&](int rank) {
    auto options = cluster_options({0, 0, 1, 1}, rank, 0);
    if (rank == 3) options.cluster_nics = {{"none0", "10.255.1.1"}};
    const auto start = Clock::now();
    const auto error = raised<NicError>([&] { make_communicator(store, options); });
    CHECK(contains(error.what(), "none0"));
    CHECK(Clock::now() - start < options.connect_timeout);
  });
  std::printf("set-up: ok\n");
}

void check_deadline() {
  std::barrier entering(3);  // of wide groups those who are there are told apart from the late one by their deadlines
  run_clusters({0, 0, 1, 1}, 0, [&](Communicator& comm) {
    all_reduce(comm, 1000);
    if (comm.rank() == 2) {
      // Well past the others' deadline and what they take to find out whom they wait for (1.2 s).
      std::this_thread::sleep_for(std::chrono::seconds(5));
      raised<TimeoutError>([&] { all_reduce(comm, count); });
    } else {
      const Buffer data = owned_buffer();
      entering.arrive_and_wait();
      const auto error = raised<TimeoutError>(
          [&] { comm.all_reduce(data, ReduceOp::sum, {.timeout = std::chrono::milliseconds(1500)})->wait(); });
      CHECK(contains(error.what(), "rank 2 (host "));
    }
  });
  std::printf("deadline: ok\n");
}

void check_death() {
  // Rank 3 leaves while the others are in the middle: of the second operation, which one may enter while another is
  // still in the first.
  std::barrier done_first(4);
  run_clusters({0, 0, 1, 1}, 0, [&](Communicator& comm) {
    all_reduce(comm, 1000);
    done_first.arrive_and_wait();
    if (comm.rank() == 3) {
      comm.all_reduce(owned_buffer(), ReduceOp::sum, {.async = true});
      return;
    }
    bool lost = false;
    const bool waits = count < 100'000;
    // Held until the error is read: the thread sanitizer does not see how libstdc++ counts who holds an exception.
    std::vector<WorkPtr> works;
    try {
      for (int i = 0; i < 4; ++i) works.push_back(comm.all_reduce(owned_buffer(), ReduceOp::sum, {.async = !waits}));
      for (const auto& work : works) work->wait();
    } catch (const CommunicatorError& error) {  // destroyed with operations pending, or gone
      CHECK(contains(error.what(), "rank 3 (host "));
      lost = true;
    }
    CHECK(lost);
    CHECK(comm.is_dead());
  });
  std::printf("death: ok\n");
}

// Clusters that are wide themselves: who leaves one is named by its number in the whole group, on all ranks.
void check_names_in_wide_clusters() {
  const std::vector<int> clusters{0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1};
  for (const int leaving : {7, 10}) {
    std::barrier done_first(static_cast<std::ptrdiff_t>(clusters.size()));
    run_clusters(
        clusters, 0,
        [&](Communicator& comm) {
          all_reduce(comm, 1000);
          done_first.arrive_and_wait();
          if (comm.rank() == leaving) return;
          try {
            for (int i = 0; i < 1000; ++i) all_reduce(comm, count);
            CHECK(false);
          } catch (const CommunicatorError& error) {
            CHECK(contains(error.what(), "rank " + std::to_string(leaving) + " (host "));
            CHECK(std::string(error.what()).find("scatter' is dead") == std::string::npos);  // users do not know that
            CHECK(error.context().peer == leaving || error.context().rank == leaving);
          }
        },
        [](CommunicatorOptions& options) { options.wide_min_ranks = 4; });
  }
  std::printf("names in wide clusters: ok\n");
}

void check_abort() {
  std::barrier all(5);
  run_clusters({0, 1, 0, 1, 1}, 0, [&](Communicator& comm) {
    all.arrive_and_wait();  // one may have its communicator while the others still agree on it
    if (comm.rank() == 4) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      comm.abort("enough");
      CHECK(contains(raised<AbortedError>([&] { all_reduce(comm, 10); }).what(), "enough"));
    } else {
      const auto error = raised<AbortedError>([&] { all_reduce(comm, count); });
      CHECK(contains(error.what(), "was aborted by rank 4 (host "));
      CHECK(error.context().rank == 4);
    }
  });
  std::printf("abort: ok\n");
}

void check_destruction_with_pending() {
  for (int round = 0; round < 5; ++round) {
    WorkPtr works[4];
    run_clusters({0, 0, 1, 1}, 0, [&](Communicator& comm) {
      // All are connected when the first one leaves; what it ends may be this barrier on a slower rank, or the call.
      try {
        comm.barrier()->wait();
        works[comm.rank()] = comm.all_reduce(owned_buffer(), ReduceOp::sum, {.async = true});
      } catch (const CommunicatorError&) {
      }
    });
    for (const auto& work : works) {
      if (!work) continue;
      try {
        work->wait();
      } catch (const CommunicatorError&) {
      }
      CHECK(work->is_final());
    }
  }
  std::printf("destruction: ok\n");
}

// Blocks over clusters of two and three ranks, where the last one's go with another's. One rank is late, or leaves, or
// has other counts, of the same sum: each in turn, of each operation.
void check_blocks() {
  const std::vector<int> clusters{0, 0, 1, 1, 1};
  const auto call = [&](Communicator& comm, bool gathers, std::vector<std::size_t> counts, const CallOptions& options) {
    const auto memory =
        std::make_shared<std::vector<float>>(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
    std::vector<Buffer> blocks;
    std::size_t begin = 0;
    for (const std::size_t block : counts) {
      blocks.push_back({memory->data() + begin, block, DType::float32, memory});
      begin += block;
    }
    const Buffer own = blocks[static_cast<std::size_t>(comm.rank())];
    return gathers ? comm.all_gather(blocks, own, options) : comm.reduce_scatter(own, blocks, ReduceOp::sum, options);
  };
  const std::vector<std::size_t> even(clusters.size(), count);
  for (const bool gathers : {true, false}) {
    std::barrier made(5);  // else one may hear of it while the others still agree on its communicator
    // Read once no thread of a communicator holds them: the thread sanitizer does not see how libstdc++ counts who
    // does.
    std::vector<std::exception_ptr> errors(clusters.size());
    run_clusters(clusters, 0, [&](Communicator& comm) {
      made.arrive_and_wait();
      std::vector<std::size_t> counts = even;
      counts[2] += comm.rank() == 4;
      counts[3] -= comm.rank() == 4;
      try {
        call(comm, gathers, counts, {})->wait();
      } catch (...) {
        errors[static_cast<std::size_t>(comm.rank())] = std::current_exception();
      }
    });
    for (const auto& error : errors) {
      CHECK(error != nullptr);
      CHECK(contains(raised<MismatchError>([&] { std::rethrow_exception(error); }).what(), "with counts #"));
    }
    for (const int bad : {2, 4}) {
      std::barrier entering(4);
      run_clusters(clusters, 0, [&](Communicator& comm) {
        call(comm, gathers, even, {})->wait();
        if (comm.rank() == bad) {
          std::this_thread::sleep_for(std::chrono::seconds(5));
          raised<TimeoutError>([&] { call(comm, gathers, even, {})->wait(); });
          return;
        }
        entering.arrive_and_wait();
        const auto error = raised<TimeoutError>(
            [&] { call(comm, gathers, even, {.timeout = std::chrono::milliseconds(1500)})->wait(); });
        CHECK(contains(error.what(), "rank " + std::to_string(bad) + " (host "));
      });
      std::barrier done_first(5);
      std::ranges::fill(errors, nullptr);
      run_clusters(clusters, 0, [&](Communicator& comm) {
        call(comm, gathers, even, {})->wait();
        done_first.arrive_and_wait();
        if (comm.rank() == bad) {
          call(comm, gathers, even, {.async = true});
          return;
        }
        try {
          std::vector<WorkPtr> works;
          for (int i = 0; i < 4; ++i) works.push_back(call(comm, gathers, even, {.async = count > 100'000}));
          for (const auto& work : works) work->wait();
        } catch (...) {
          errors[static_cast<std::size_t>(comm.rank())] = std::current_exception();
        }
      });
      for (std::size_t rank = 0; rank < errors.size(); ++rank) {
        if (rank == static_cast<std::size_t>(bad)) continue;
        CHECK(errors[rank] != nullptr);
        const auto error = raised<CommunicatorError>([&] { std::rethrow_exception(errors[rank]); });
        CHECK(contains(error.what(), "rank " + std::to_string(bad) + " (host "));
      }
    }
  }
  std::printf("blocks: ok\n");
}

// Who waits carries an operation out in another way than who does not, and where something is under way already in
// that one too: they meet all the same.
void check_those_who_wait_and_those_who_do_not(bool local_completion, Transport transport) {
  const auto body = [](Communicator& comm) {
    for (int round = 0; round < 100; ++round) {
      std::vector<float> small(static_cast<std::size_t>(round) * 7 + 1, static_cast<float>(comm.rank() + round));
      std::vector<float> large(round % 10 == 0 ? 300'000 : 100, static_cast<float>(comm.rank()));
      std::vector<WorkPtr> works;
      if (round % 3 == 0)
        works.push_back(comm.all_reduce(buffer(large, DType::float32), ReduceOp::max, {.async = true}));
      const bool waits = (round + comm.rank()) % 2 == 0;
      works.push_back(comm.all_reduce(buffer(small, DType::float32), ReduceOp::sum, {.async = !waits}));
      std::vector<float> sent(small.size(), static_cast<float>(comm.rank()));
      works.push_back(comm.broadcast(buffer(sent, DType::float32), round % 5, {.async = (round / 2) % 2 == 0}));
      std::vector<float> gathered(5 * small.size()), scattered(small.size());
      std::vector<Buffer> blocks;
      for (std::size_t r = 0; r < 5; ++r)
        blocks.push_back({gathered.data() + r * small.size(), small.size(), DType::float32, nullptr});
      std::vector<float> own(small.size(), static_cast<float>(comm.rank() * round));
      works.push_back(comm.all_gather(blocks, buffer(own, DType::float32), {.async = !waits}));
      if (!waits) works.back()->wait();
      works.push_back(comm.reduce_scatter(buffer(scattered, DType::float32), blocks, ReduceOp::sum,
                                          {.async = (round + comm.rank()) % 3 == 0}));
      for (const auto& work : works) work->wait();
      CHECK(std::ranges::all_of(scattered,
                                [&](float value) { return value == 5 * static_cast<float>(comm.rank() * round); }));
      CHECK(std::ranges::all_of(small, [&](float value) { return value == static_cast<float>(10 + 5 * round); }));
      CHECK(std::ranges::all_of(sent, [&](float value) { return value == static_cast<float>(round % 5); }));
      CHECK(round % 3 != 0 || std::ranges::all_of(large, [](float value) { return value == 4; }));
    }
  };
  run_clusters({0, 0, 1, 1, 1}, 0, body, [&](CommunicatorOptions& options) {
    options.local_completion = local_completion;
    options.transport = transport;
  });
  std::printf("those who wait and those who do not: ok\n");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  check_usage();
  check_setup();
  for (const auto transport : {Transport::tcp, Transport::automatic})
    for (const bool local_completion : {false, true})
      check_those_who_wait_and_those_who_do_not(local_completion, transport);
  for (const std::size_t elements : {3'000'000, 1'000}) {
    count = elements;
    check_mismatches();
    check_deadline();
    check_death();
    check_names_in_wide_clusters();
    check_abort();
    check_destruction_with_pending();
    check_blocks();
  }
  return 0;
}
