// Wide groups in which one rank never enters an operation, or stays in it, and others come late: at the deadline every
// rank names the one that all wait for, and nobody that is only late or waits itself.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <random>
#include <set>
#include <utility>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool is_slow_build = true;
#else
constexpr bool is_slow_build = false;
#endif

// Long beside how late a rank comes, also where its thread does not get a processor at once.
constexpr auto timeout = 3000ms;
// Who entered so long after the first rank was missing at its deadline, or nearly.
constexpr auto late_enough = timeout - 500ms;
// Groups beside each other: so many keep to 1,024 descriptors.
constexpr std::size_t groups_at_once = 4;

std::atomic<int> named{0};
std::atomic<int> misnamed{0};

struct Round {
  int size = 16;
  Transport transport = Transport::automatic;
  int before = 0;           // operations that all ranks enter
  int kind = 0;             // of the one that somebody does not
  bool is_async = false;    // on every other rank: an I/O thread drives it
  std::set<int> missing{};  // who never enters it
  std::vector<std::chrono::milliseconds> delays{};
  const char* words = "has not entered it";

  static Round of(unsigned seed, int size, int missing_count) {
    std::mt19937 random(seed);
    const auto below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
    Round round{.size = size, .before = below(3), .kind = below(5), .is_async = below(2) == 0};
    while (static_cast<int>(round.missing.size()) < missing_count) round.missing.insert(below(size));
    for (int rank = 0; rank < size; ++rank) round.delays.emplace_back(below(8) == 0 ? below(1000) : below(400));
    return round;
  }
};

WorkPtr start(Communicator& comm, int kind, Duration deadline, bool is_async = false) {
  CallOptions options;
  options.timeout = deadline;
  options.async = is_async;
  const auto size = static_cast<std::size_t>(comm.size());
  const std::size_t count = kind == 2 ? 20'000 : 100;  // in three steps, in two
  const auto memory = std::make_shared<std::vector<float>>((size + 1) * count, 1.0f);
  std::vector<Buffer> blocks;
  for (std::size_t i = 0; i <= size; ++i) blocks.push_back({memory->data() + i * count, count, DType::float32, memory});
  const Buffer data = blocks.back();
  blocks.pop_back();
  switch (kind) {
    case 0:
      return comm.barrier(options);
    case 1:
    case 2:
      return comm.all_reduce(data, ReduceOp::sum, options);
    case 3:
      return comm.broadcast(data, comm.size() / 2, options);
    default:
      return comm.all_gather(blocks, data, options);
  }
}

// "rank 3 (" of all that the message says to wait for.
std::set<int> waited_for(const std::string& message) {
  std::set<int> ranks;
  const auto begin = message.find(", waiting for ");
  const auto end = message.find("; raise the timeout");
  if (begin == std::string::npos || end == std::string::npos) return ranks;
  const std::string said = message.substr(begin, end - begin);
  for (auto at = said.find("rank "); at != std::string::npos; at = said.find("rank ", at + 1))
    ranks.insert(std::atoi(said.c_str() + at + 5));
  return ranks;
}

// What a rank raised.
struct Raised {
  int rank = 0;
  Clock::time_point entered{};
  bool is_timeout = false;
  std::optional<int> peer{};
  std::string message{};
};

void check_name(const Round& round, const std::set<int>& expected, const Raised& raised) {
  ++named;
  const std::set<int> said = waited_for(raised.message);
  const auto is_expected = [&](int one) { return expected.contains(one); };
  const bool is_right = raised.is_timeout && raised.peer && is_expected(*raised.peer) && !said.empty() &&
                        std::ranges::all_of(said, is_expected) && raised.message.find(round.words) != std::string::npos;
  if (is_right || ++misnamed > 20) return;
  std::fprintf(stderr, "%d ranks, operation %d, of kind %d, without rank %d: rank %d names %d and says '%s'\n",
               round.size, round.before, round.kind, *round.missing.begin(), raised.rank, raised.peer.value_or(-1),
               raised.message.c_str());
}

CommunicatorOptions options_of(const Round& round, int rank) {
  CommunicatorOptions options{.rank = rank, .size = round.size, .name = "test", .transport = round.transport};
  options.timeout = 60s;
  options.connect_timeout = 40s;
  if (round.transport == Transport::tcp) options.nics = {{"lo", "127.0.0.1"}};
  return options;
}

// Of the first of `calls` that fails. What its work holds is read before it is let go of: the thread sanitizer does not
// see how libstdc++ counts who holds an exception.
Raised raised_by(int rank, const std::function<WorkPtr()>& start_one, int calls = 1) {
  Raised raised{.rank = rank, .entered = Clock::now()};
  WorkPtr work;
  try {
    for (int i = 0; i < calls; ++i) {
      work = start_one();
      work->wait();
    }
    raised.message = "nothing";
  } catch (const HolmesError& error) {
    raised.is_timeout = dynamic_cast<const TimeoutError*>(&error) != nullptr;
    raised.peer = error.context().peer;
    raised.message = error.what();
  }
  return raised;
}

void check_names(const Round& round, const std::vector<Raised>& all) {
  std::set<int> expected = round.missing;
  const auto first = std::ranges::min(all, {}, &Raised::entered).entered;
  for (const Raised& raised : all)
    if (raised.entered - first > late_enough) expected.insert(raised.rank);
  for (const Raised& raised : all) check_name(round, expected, raised);
}

void run_round(const Round& round) {
  const auto store = make_local_store();
  std::latch all_connected(round.size);
  std::latch all_named(round.size);
  std::mutex mutex;
  std::vector<Raised> all;
  run_ranks(round.size, [&](int rank) {
    const auto comm = make_communicator(store, options_of(round, rank));
    for (int i = 0; i < round.before; ++i) start(*comm, i, 60s)->wait();
    all_connected.arrive_and_wait();
    if (!round.missing.contains(rank)) {
      std::this_thread::sleep_for(round.delays[static_cast<std::size_t>(rank)]);
      const Raised raised =
          raised_by(rank, [&] { return start(*comm, round.kind, timeout, round.is_async && rank % 2 == 0); });
      const std::lock_guard lock(mutex);
      all.push_back(raised);
    }
    all_named.arrive_and_wait();  // nobody leaves before
  });
  check_names(round, all);
}

// --- a rank that stays in an operation which ranks that do not need it any more have left ---

struct Stall {
  std::latch has_begun{1};
  std::latch until;
};

Stall* next_stall = nullptr;  // the first thread's

void stall() {
  if (!next_stall) return;
  Stall& now = *std::exchange(next_stall, nullptr);
  now.has_begun.count_down();
  now.until.wait();
}

// Rank `stalled` is this thread, the process's first: it looks for signals while it waits in its row, and does not come
// back. An I/O thread ends that step, but nobody begins the next one. Who does not need it in this operation waits for
// it, and for those that do, in the next one.
void run_stalled_round(int size, int stalled) {
  Round round{.size = size, .kind = 0, .missing = {stalled}, .words = ""};
  const auto store = make_local_store();
  std::latch all_connected(size);
  Stall stays{.until = std::latch(size - 1)};
  std::mutex mutex;
  std::vector<Raised> all;
  const auto body = [&](int rank) {
    const auto comm = make_communicator(store, options_of(round, rank));
    all_connected.arrive_and_wait();
    if (rank == stalled) next_stall = &stays;
    if (rank != stalled) stays.has_begun.wait();
    const Raised raised = raised_by(rank, [&] { return start(*comm, round.kind, timeout); }, 3);
    if (rank == stalled) return;
    const std::lock_guard lock(mutex);
    all.push_back(raised);
    stays.until.count_down();
  };
  std::thread others([&] {
    run_ranks(size, [&](int rank) {
      if (rank != stalled) body(rank);
    });
  });
  body(stalled);
  others.join();
  check_names(round, all);
}

void run_rounds(const char* title, const std::vector<Round>& rounds, std::size_t at_once) {
  const int before = misnamed;
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> groups;
  for (std::size_t i = 0; i < at_once; ++i)
    groups.emplace_back([&] {
      for (auto at = next++; at < rounds.size(); at = next++) run_round(rounds[at]);
    });
  for (auto& group : groups) group.join();
  std::printf("%s: %d names so far, %d of these wrong\n", title, named.load(), misnamed - before);
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  ::setenv("HOLMES_WIDE_MIN_RANKS", "4", 1);  // rows and columns of 16 ranks are wide too
  const unsigned seeds = is_slow_build ? 8 : 24;
  std::vector<Round> rounds;
  for (unsigned seed = 0; seed < seeds; ++seed) rounds.push_back(Round::of(seed, 16, seed % 4 == 3 ? 2 : 1));
  run_rounds("16 ranks", rounds, groups_at_once);
  rounds.clear();
  for (unsigned seed = 0; seed < seeds / 8; ++seed) rounds.push_back(Round::of(seed, 36, 1));
  run_rounds("36 ranks", rounds, 1);
  rounds.clear();
  for (unsigned seed = 0; seed < 2; ++seed) {
    rounds.push_back(Round::of(seed, 13, 1));
    rounds.back().transport = Transport::tcp;
  }
  run_rounds("13 ranks over TCP", rounds, 2);
  set_signal_check(stall);
  for (const int stalled : {0, 7}) run_stalled_round(16, stalled);
  std::printf("a rank that stays in an operation: %d names so far\n", named.load());
  CHECK(named > 100);
  CHECK(misnamed == 0);
  return 0;
}
