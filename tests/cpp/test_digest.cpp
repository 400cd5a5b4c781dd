// Results that are the same on all ranks are compared every so many operations: a rank whose memory is faulty is named
// by all, with host and NIC, before anybody uses what it holds.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "check.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/error.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

const auto page_bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
constexpr std::size_t pages = 64;

// So many pages of memory. Faulty: an address line is stuck, so that two pages one behind the other are one and the
// same and the last that was written is in both. `at_end`: the last two, else the first two.
class Memory {
public:
  explicit Memory(bool is_faulty = false, bool at_end = false) {
    const auto map = [](void* at, int flags, int fd, std::size_t bytes) {
      return static_cast<std::byte*>(::mmap(at, bytes, PROT_READ | PROT_WRITE, flags, fd, 0));
    };
    data_ = map(nullptr, MAP_PRIVATE | MAP_ANONYMOUS, -1, pages * page_bytes);
    CHECK(data_ != MAP_FAILED);
    if (!is_faulty) return;
    const int fd = ::memfd_create("page", MFD_CLOEXEC);
    CHECK(::ftruncate(fd, static_cast<off_t>(page_bytes)) == 0);
    std::byte* at = data_ + (at_end ? pages - 2 : 0) * page_bytes;
    for (int page = 0; page < 2; ++page, at += page_bytes) CHECK(map(at, MAP_SHARED | MAP_FIXED, fd, page_bytes) == at);
    ::close(fd);
  }
  ~Memory() { ::munmap(data_, pages * page_bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void fill(unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < pages * page_bytes / sizeof(float); ++i)
      reinterpret_cast<float*>(data_)[i] = static_cast<float>(random() % 1000);
  }
  // The first ones, or the last ones.
  Buffer first(std::size_t count) { return {data_, count * page_bytes / sizeof(float), DType::float32, nullptr}; }
  Buffer last(std::size_t count) {
    return {data_ + (pages - count) * page_bytes, count * page_bytes / sizeof(float), DType::float32, nullptr};
  }

private:
  std::byte* data_ = nullptr;
};

struct Outcome {
  std::string message;
  ErrorContext context;
  int done = 0;  // operations
  bool is_dead = false;
};

using Operation = std::function<WorkPtr(Communicator&, Memory&, CallOptions)>;

// What `operation`, twelve times on `ranks` ranks, comes to on each of them.
std::vector<Outcome> run(int ranks, std::optional<int> faulty, const CommunicatorOptions& given, bool is_async,
                         const Operation& operation) {
  const auto store = make_local_store();
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      CommunicatorOptions options = given;
      options.rank = rank;
      options.size = ranks;
      options.name = "dp0";
      options.connect_timeout = 20s;
      options.timeout = 20s;
      const auto comm = make_communicator(store, options);
      // In another rank's part of an all_reduce: what it sends of its own is right.
      Memory memory(rank == faulty, rank != ranks - 1);
      try {
        for (int round = 0; round < 12; ++round) {
          memory.fill(static_cast<unsigned>(100 * round + rank));
          operation(*comm, memory, {.timeout = {}, .async = is_async})->wait();
          ++outcome.done;
        }
      } catch (const IntegrityError& error) {
        outcome.message = error.what();
        outcome.context = error.context();
      }
      outcome.is_dead = comm->is_dead();
    });
  for (auto& thread : threads) thread.join();
  return outcomes;
}

WorkPtr all_reduce(Communicator& comm, Memory& memory, CallOptions call) {
  return comm.all_reduce(memory.first(pages), ReduceOp::sum, call);
}

// Both pages, and few enough for one step or for log2(n).
WorkPtr small_all_reduce(Communicator& comm, Memory& memory, CallOptions call) {
  const bool at_end = comm.rank() != comm.size() - 1;
  return comm.all_reduce(at_end ? memory.last(2) : memory.first(2), ReduceOp::max, call);
}

WorkPtr broadcast(Communicator& comm, Memory& memory, CallOptions call) {
  return comm.broadcast(memory.first(pages), 0, call);
}

WorkPtr all_gather(Communicator& comm, Memory& memory, CallOptions call) {
  const std::size_t count = pages / static_cast<std::size_t>(comm.size());
  std::vector<Buffer> outputs;
  for (int rank = 0; rank < comm.size(); ++rank) {
    Buffer part = memory.first(count);
    part.data = part.begin() + static_cast<std::size_t>(rank) * part.bytes();
    outputs.push_back(part);
  }
  // The last part ends where the memory does.
  outputs.back() = memory.last(count);
  return comm.all_gather(outputs, outputs[static_cast<std::size_t>(comm.rank())], call);
}

CommunicatorOptions options_of(Transport transport, int every) {
  CommunicatorOptions options{.transport = transport};
  options.integrity_digest_every = every;
  return options;
}

void check_named(const std::vector<Outcome>& outcomes, int faulty, int done) {
  for (int rank = 0; rank < static_cast<int>(outcomes.size()); ++rank) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    CHECK(outcome.done == done && outcome.is_dead);
    CHECK(contains(outcome.message, "communicator 'dp0': the result of "));
    CHECK(contains(outcome.message, "is not that of the other ranks ("));
    CHECK(contains(outcome.message, "): rank " + std::to_string(faulty) + " (host "));
    CHECK(contains(outcome.message, "(CRC32C "));
    // Whoever said it first, the others pass on: the faulty one speaks of itself.
    const auto about = outcome.context.peer ? outcome.context.peer : outcome.context.rank;
    CHECK(about == faulty);
  }
}

void check_faulty_memory() {
  // With the first rank that is tried. (Of a chain's ranks only the last one: the others pass on what they hold.)
  const std::pair<Operation, int> operations[] = {
      {all_reduce, 0}, {small_all_reduce, 0}, {all_gather, 0}, {broadcast, 2}};
  for (const Transport transport : {Transport::tcp, Transport::shm})
    for (const auto& [operation, first] : operations)
      for (int faulty = first; faulty < 3; ++faulty)
        for (const bool is_async : {false, true})
          check_named(run(3, faulty, options_of(transport, 1), is_async, operation), faulty, 0);
}

void check_every_so_many() {
  check_named(run(3, 1, options_of(Transport::tcp, 5), false, all_reduce), 1, 4);
  for (const auto& outcome : run(3, 1, options_of(Transport::tcp, 0), false, all_reduce)) CHECK(outcome.done == 12);
}

void check_right_results() {
  for (const Transport transport : {Transport::tcp, Transport::shm})
    for (const Operation operation : {all_reduce, small_all_reduce, all_gather, broadcast})
      for (const bool is_async : {false, true})
        for (const auto& outcome : run(3, {}, options_of(transport, 1), is_async, operation))
          CHECK(outcome.done == 12 && !outcome.is_dead);
}

// Of two, nobody knows which is right.
void check_two_ranks() {
  for (const auto& outcome : run(2, 1, options_of(Transport::tcp, 1), false, all_reduce)) {
    CHECK(contains(outcome.message, "no majority says which is right: rank 0 (host "));
    CHECK(contains(outcome.message, ", rank 1 (host ") && contains(outcome.message, " on NIC "));
    CHECK(outcome.context.peer.has_value() && !outcome.context.host.empty() && !outcome.context.nic.empty());
  }
}

void check_agreement() {
  const auto store = make_local_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      CommunicatorOptions options = options_of(Transport::automatic, rank == 0 ? 10 : 20);
      options.rank = rank;
      options.size = 2;
      options.connect_timeout = 20s;
      const std::string message = message_of<UsageError>([&] { make_communicator(store, options); });
      CHECK(contains(message, "compare results every 10 and 20 operations; give every rank the same"));
    });
  for (auto& rank : ranks) rank.join();
  const std::string message =
      message_of<UsageError>([&] { make_communicator(store, options_of(Transport::automatic, -1)); });
  CHECK(contains(message, "integrity_digest_every=-1 is not possible"));
}

}  // namespace

int main() {
  check_right_results();
  check_faulty_memory();
  check_every_so_many();
  check_two_ranks();
  check_agreement();
  return test::result("test_digest");
}
