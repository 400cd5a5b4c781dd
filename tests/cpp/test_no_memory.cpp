// One allocation fails, whichever it is, on whichever thread, or twenty in a row do: every rank's operations end, with
// the right result or an error, at once; nobody sleeps for ever and no process ends. Each time in a process of its own,
// where nothing has its room yet.
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <latch>
#include <new>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/record/dump.hpp"
#include "holmes/record/watcher.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr long none = -1'000'000;
std::atomic<long> allocations_left{none};  // until they fail
std::atomic<long> failing{1};              // in a row

bool fails() {
  long left = allocations_left.load(std::memory_order_relaxed);
  while (left > -failing)
    if (allocations_left.compare_exchange_weak(left, left - 1)) return left <= 0;
  return false;
}

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// std::stable_sort asks for its buffer so, and frees it as the others: both of one kind, as sanitizers want it.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return fails() ? nullptr : std::malloc(bytes ? bytes : 1);
}
// Inlined alone, they look as if they freed what another kind of new gave.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

constexpr std::size_t count = 50'000;

struct Outcome {
  bool is_right = false;
  std::string error;
};

// `begin`: called once all memory of the test's own is there.
void work_of(Communicator& comm, Outcome& outcome, const std::function<void()>& begin) {
  const int ranks = comm.size();
  const auto size = static_cast<std::size_t>(ranks);
  std::vector<float> sum(count, 1), message(1000, static_cast<float>(comm.rank())), received(1000), all(1000 * size);
  const auto buffer = [](std::vector<float>& data) {
    return Buffer{data.data(), data.size(), DType::float32, nullptr};
  };
  std::vector<Buffer> outputs;
  for (std::size_t rank = 0; rank < size; ++rank)
    outputs.push_back({all.data() + 1000 * rank, 1000, DType::float32, nullptr});
  CallOptions async;
  async.async = true;
  std::vector<WorkPtr> works;
  works.reserve(4);
  outcome.error.reserve(1000);
  const std::string reason = "rank has no memory";
  begin();
  try {
    const int next = (comm.rank() + 1) % ranks, before = (comm.rank() + ranks - 1) % ranks;
    works.push_back(comm.all_reduce(buffer(sum), ReduceOp::sum, async));
    works.push_back(comm.recv(buffer(received), before, 7, async));
    works.push_back(comm.send(buffer(message), next, 7, async));
    works.push_back(comm.all_gather(outputs, buffer(message), async));
    for (const auto& work : works) work->wait();
    comm.barrier();
    outcome.is_right = sum == std::vector<float>(count, static_cast<float>(ranks)) &&
                       received == std::vector<float>(1000, static_cast<float>(before)) && all[0] == 0 &&
                       all[1500] == 1 && all.back() == static_cast<float>(ranks - 1);
    if (!outcome.is_right) outcome.error = "wrong numbers";
  } catch (const std::exception& error) {
    outcome.error = error.what();
    comm.abort(reason);  // where the call itself threw, what came before goes on
    for (const auto& work : works) work->await_final();
  }
}

// Short calls, of which each rank is late in turn: so the others go on with them in another way.
void short_work_of(Communicator& comm, Outcome& outcome, const std::function<void()>& begin) {
  constexpr auto longer_than_polls = 2ms;
  const int ranks = comm.size();
  const int next = (comm.rank() + 1) % ranks, before = (comm.rank() + ranks - 1) % ranks;
  float sum = 0, received = -1, sent = static_cast<float>(comm.rank());
  const std::vector<P2pCall> calls{{false, {&received, 1, DType::float32, nullptr}, before, 7},
                                   {true, {&sent, 1, DType::float32, nullptr}, next, 7}};
  outcome.error.reserve(1000);
  const std::string reason = "rank has no memory";
  begin();
  try {
    outcome.is_right = true;
    for (int round = 0; round < 12; ++round) {
      if (round % ranks == comm.rank()) std::this_thread::sleep_for(longer_than_polls);
      sum = 1;
      comm.all_reduce({&sum, 1, DType::float32, nullptr}, ReduceOp::sum)->wait();
      for (const WorkPtr& work : comm.batch(calls)) work->wait();
      comm.barrier()->wait();
      float told = sent;
      comm.broadcast({&told, 1, DType::float32, nullptr}, round % ranks)->wait();
      outcome.is_right &= told == static_cast<float>(round % ranks);
      outcome.is_right &= sum == static_cast<float>(ranks) && received == static_cast<float>(before);
    }
    if (!outcome.is_right) outcome.error = "wrong numbers";
  } catch (const std::exception& error) {
    outcome.is_right = false;
    outcome.error = error.what();
    comm.abort(reason);
  }
}

enum class Kind { tcp, shm, brief, brief_tcp, clusters, wide };

const char* name(Kind kind) {
  constexpr const char* names[] = {"tcp", "shm", "brief", "brief_tcp", "clusters", "wide"};
  return names[static_cast<int>(kind)];
}

int ranks_of(Kind kind) { return kind == Kind::wide ? 16 : 3; }

CommunicatorOptions options_of(Kind kind, int rank) {
  if (kind == Kind::clusters) {
    CommunicatorOptions options{.rank = rank, .size = ranks_of(kind), .transport = Transport::tcp, .timeout = 20s};
    options.nics = options.cluster_nics = {{"lo", "127.0.0.1"}};
    options.clusters = {0, 0, 1};
    options.hierarchical_min_bytes = 0;
    return options;
  }
  const Transport transport = kind == Kind::shm || kind == Kind::brief ? Transport::shm : Transport::tcp;
  CommunicatorOptions options{.rank = rank, .size = ranks_of(kind), .transport = transport, .timeout = 20s};
  if (kind == Kind::wide) options.wide_min_ranks = 4;
  if (kind == Kind::brief_tcp) options.local_completion = true;
  return options;
}

// Returns whether the allocation was reached.
bool run(Kind kind, long allocation) {
  const auto store = make_local_store();
  const int ranks = ranks_of(kind);
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  std::latch connected(ranks), finished(ranks);
  std::vector<std::thread> threads;
  Clock::time_point begun;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      const auto comm = make_communicator(store, options_of(kind, rank));
      const auto work = kind == Kind::brief || kind == Kind::brief_tcp ? short_work_of : work_of;
      work(*comm, outcomes[static_cast<std::size_t>(rank)], [&] {
        connected.arrive_and_wait();
        if (rank == 0) begun = Clock::now(), allocations_left = allocation;
      });
      finished.arrive_and_wait();
    });
  for (auto& thread : threads) thread.join();
  const bool was_reached = allocations_left.exchange(none) < 0;
  CHECK(Clock::now() - begun < 10s);
  for (int rank = 0; rank < ranks; ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    const bool is_well = outcome.is_right || (was_reached && outcome.error != "wrong numbers");
    if (!is_well) std::fprintf(stderr, "allocation %ld, rank %d: %s\n", allocation, rank, outcome.error.c_str());
    CHECK(is_well);
  }
  return was_reached;
}

// As run, in a process of its own, where the allocation and the next ones fail, `in_row` in all.
bool run_apart(Kind kind, long allocation, long in_row) {
  constexpr int reached = 0, not_reached = 2, failed = 1;
  constexpr unsigned patience_s = 30;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(patience_s);
    failures = 0;  // of the others
    failing = in_row;
    const bool was_reached = run(kind, allocation);
    std::exit(failures != 0 ? failed : was_reached ? reached : not_reached);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  const bool has_exited = WIFEXITED(status);
  const int code = has_exited ? WEXITSTATUS(status) : failed;
  if (code == reached || code == not_reached) return code == reached;
  std::fprintf(stderr, "%s, allocation %ld and %ld after it: ", name(kind), allocation, in_row - 1);
  if (has_exited)
    std::fprintf(stderr, "exit status %d\n", code);
  else if (WTERMSIG(status) == SIGALRM)
    std::fprintf(stderr, "still waiting after %u s\n", patience_s);
  else
    std::fprintf(stderr, "ended by signal %d\n", WTERMSIG(status));
  ++failures;
  return true;
}

// Of this process's watcher.
sockaddr_un debug_address() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  for (const auto& entry : std::filesystem::directory_iterator(debug_socket_folder()))
    entry.path().string().copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

// How many bytes it says to who asks.
std::size_t asked(const sockaddr_un& address) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval patience{10, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  std::size_t said = 0;
  char buffer[4096];
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
    for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) said += static_cast<std::size_t>(got);
  ::close(fd);
  return said;
}

// The thread that answers for the process outlives a time without memory, whatever it does then.
void watcher_without_memory() {
  char folder[] = "/tmp/holmes-test-watcher-XXXXXX";
  CHECK(::mkdtemp(folder) != nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::setenv("XDG_RUNTIME_DIR", folder, 1);
    failures = 0;
    Env env = Env::read();
    env.flight_recorder_folder = std::string(folder) + "/dumps";
    env.flight_recorder_signal = SIGUSR2;
    set_dump_folder(env.flight_recorder_folder);  // has its memory then
    failing = -none - 1;                          // all
    allocations_left = 0;
    start_watcher(env);  // cannot, and does without
    allocations_left = none;
    start_watcher(env);
    const sockaddr_un address = debug_address();
    CHECK(asked(address) > 100);
    allocations_left = 0;
    for (int i = 0; i < 3; ++i) {
      asked(address);
      ::kill(::getpid(), SIGUSR2);
    }
    asked(address);
    allocations_left = none;
    CHECK(asked(address) > 100);
    std::filesystem::remove_all(folder);
    std::exit(failures != 0 ? 1 : 0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// Sanitizers make each process take ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr long stride = 4;
#else
constexpr long stride = 1;
#endif

}  // namespace

int main() {
  watcher_without_memory();
  for (const Kind kind : {Kind::tcp, Kind::shm, Kind::brief, Kind::brief_tcp, Kind::clusters, Kind::wide}) {
    for (const long in_row : {1, 20}) {
      int reached = 0, tried = 0;
      for (long allocation = 0; allocation < 300;
           allocation += stride * (allocation < 80 ? 1 : 7) * (in_row > 1 ? 3 : 1) * (kind == Kind::wide ? 5 : 1),
                ++tried)
        reached += run_apart(kind, allocation, in_row) ? 1 : 0;
      CHECK(4 * reached > tried);
    }
  }
  return test::result("test_no_memory");
}
