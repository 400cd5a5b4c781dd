// Wide groups, small ones: every operation against its plain result, ranks that disagree, that leave, that abort.
#include <atomic>

#include "collective_checks.hpp"
#include "holmes/comm/host_communicator.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

void check_messages(Communicator& comm) {
  // A ring, and pairs of which many share neither row nor column.
  for (const int distance : {1, 4, comm.size() / 2}) {
    auto data = values(comm.rank(), 100);
    std::vector<std::int64_t> got(100);
    const int to = (comm.rank() + distance) % comm.size();
    const int from = (comm.rank() + comm.size() - distance) % comm.size();
    for (int round = 0; round < 2; ++round) {
      const auto works =
          comm.batch({{true, buffer(data, DType::int64), to, 1}, {false, buffer(got, DType::int64), from, 1}},
                     {.timeout = {}, .async = true});
      for (const auto& work : works) work->wait();
      CHECK(got == values(from, 100));
      CHECK(works.back()->source_rank() == from);
    }
  }
  bool is_refused = false;
  try {
    std::vector<std::int64_t> got(1);
    comm.recv_any(buffer(got, DType::int64), 0, {});
  } catch (const UsageError&) {
    is_refused = true;
  }
  CHECK(is_refused);
}

void check_all(Communicator& comm) {
  comm.barrier()->wait();
  for (const std::size_t count :
       {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{1000}, std::size_t{40001}}) {
    check_all_reduce(comm, count);
    check_reduce_scatter(comm, count);
    check_all_gather(comm, count);
    for (const int root : {0, comm.size() / 2, comm.size() - 1}) check_rooted(comm, count, root);
    check_all_to_all(comm, count);
    check_async(comm, count / 4);
  }
  check_messages(comm);
  check_split(comm);
}

// The last rank does something else than the others: all of them raise an `Error` and say whom it is about.
template <class Error>
void check_failure(const char* name, const std::function<void(Communicator&)>& other, const std::string& said) {
  run_communicators(13, Transport::tcp, [&](Communicator& comm) {
    if (comm.rank() == comm.size() - 1) {
      check_all_reduce(comm, 100);
      try {
        other(comm);
      } catch (const HolmesError&) {
      }
      return;
    }
    const auto start = Clock::now();
    try {
      check_all_reduce(comm, 100);  // a slow rank is in it still when the last one has gone on
      for (int i = 0; i < 3; ++i) check_all_reduce(comm, 20000);
      std::fprintf(stderr, "%s: rank %d heard nothing\n", name, comm.rank());
      CHECK(false);
    } catch (const Error& error) {
      if (std::string(error.what()).find(said) == std::string::npos)
        std::fprintf(stderr, "%s: %s\n", name, error.what());
      CHECK(std::string(error.what()).find(said) != std::string::npos);
    }
    CHECK(Clock::now() - start < std::chrono::seconds(10));
    CHECK(comm.is_dead());
  });
  std::printf("%s: ok\n", name);
}

void check_failures() {
  check_failure<MismatchError>("another operation", [](Communicator& comm) { comm.barrier()->wait(); }, "rank ");
  check_failure<MismatchError>("another count", [](Communicator& comm) { check_all_reduce(comm, 20001); }, "rank ");
  check_failure<AbortedError>(
      "abort", [](Communicator& comm) { comm.abort("enough"); }, "was aborted by rank 12 (host ");
  check_failure<PeerLostError>("a rank that leaves", [](Communicator&) {}, "rank 12 (host ");
}

std::string message_of_wait(Work& work) {
  try {
    work.wait();
  } catch (const TimeoutError& error) {
    return error.what();
  }
  return "";
}

// Who looks after peers for a moment leaves no operation behind that another thread wanted to drive then.
void check_looks() {
  constexpr int rounds = 2000;
  const auto store = make_local_store();
  run_ranks(2, [&](int rank) {
    HostCommunicator comm(store, {.rank = rank,
                                  .size = 2,
                                  .name = "looked after",
                                  .nics = {{"lo", "127.0.0.1"}},
                                  .transport = Transport::tcp,
                                  .timeout = std::chrono::seconds(20)});
    std::atomic<bool> is_over{false};
    std::thread looking([&] {
      while (!is_over) {
        CHECK(comm.look_at_peers().empty());
        std::this_thread::yield();
      }
    });
    for (int i = 0; i < rounds; ++i) {
      std::vector<std::int64_t> data{rank + 1};
      const auto work = comm.all_reduce(buffer(data, DType::int64), ReduceOp::sum, {.timeout = {}, .async = true});
      work->await_final();  // driven by the I/O thread
      CHECK(work->state() == WorkState::completed && data[0] == 3);
    }
    is_over = true;
    looking.join();
    comm.barrier({})->wait();
  });
  std::printf("looked after: ok\n");
}

// As another store, but who reads what the ranks of a pair say of themselves waits until it is let go.
class StandingStore final : public Store {
public:
  explicit StandingStore(std::shared_ptr<Store> base) : base_(std::move(base)) {}
  void set(const std::string& key, const std::string& value) override { base_->set(key, value); }
  void wait(const std::string& key, Duration timeout) override { base_->wait(key, timeout); }
  std::string get(const std::string& key, Duration timeout) override {
    if (key.find("/pair") != std::string::npos && key.ends_with("/records")) {
      stands_.test_and_set();
      stands_.notify_all();
      goes_.wait(false);
    }
    return base_->get(key, timeout);
  }
  void await_standing() const { stands_.wait(false); }
  void let_go() {
    goes_.test_and_set();
    goes_.notify_all();
  }

private:
  std::shared_ptr<Store> base_;
  std::atomic_flag stands_, goes_;
};

// A rank stands still while it is being connected with another: that one's deadline counts, and its end waits for none.
void check_a_pair_that_stands(bool is_left) {
  constexpr int size = 13, last = size - 1;
  const auto store = make_local_store();
  const auto standing = std::make_shared<StandingStore>(store);
  run_ranks(size, [&](int rank) {
    CommunicatorOptions options{.rank = rank, .size = size, .name = "stands", .transport = Transport::tcp};
    options.nics = {{"lo", "127.0.0.1"}};
    options.connect_timeout = std::chrono::seconds(120);
    auto comm = make_communicator(rank == last ? std::static_pointer_cast<Store>(standing) : store, options);
    std::vector<std::int64_t> data(100);
    if (rank == 0) {
      const auto start = Clock::now();
      const auto timeout = std::chrono::seconds(is_left ? 100 : 2);
      const auto work = comm->send(buffer(data, DType::int64), last, 0, {.timeout = timeout, .async = true});
      if (is_left) {
        standing->await_standing();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that it waits to be connected
        comm.reset();
      } else {
        const auto said = message_of_wait(*work);
        CHECK(contains(said, "rank 12 has called too, but is not connected yet"));
      }
      CHECK(Clock::now() - start < std::chrono::seconds(20));
      standing->let_go();
    } else if (rank == last) {
      try {
        comm->recv(buffer(data, DType::int64), 0, 0, {})->wait();
        CHECK(false);
      } catch (const HolmesError&) {
      }
    }
  });
  std::printf("a pair that stands, %s: ok\n", is_left ? "left" : "overdue");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  ::setenv("HOLMES_WIDE_MIN_RANKS", "2", 1);
  for (const int size : {5, 6, 7, 12, 13, 16}) {  // 16: columns that are wide, too; no more, for 1,024 descriptors
    run_communicators(size, Transport::tcp, check_all);
    std::printf("%d ranks: ok\n", size);
  }
  run_communicators(7, Transport::automatic, check_all);
  check_failures();
  check_looks();
  for (const bool is_left : {false, true}) check_a_pair_that_stands(is_left);
  return 0;
}
