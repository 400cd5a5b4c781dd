// Ranks that connect a mesh: threads over a local store; and what must hold of the result.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/bootstrap/mesh.hpp"
#include "holmes/bootstrap/rank_info.hpp"
#include "holmes/core/env.hpp"
#include "holmes/discover/host.hpp"

namespace holmes::test {

using namespace std::chrono_literals;

inline constexpr std::size_t segment_bytes = 1 << 16;

// As a rank "on host b1" writes it that accepts connections on this port of the loopback device.
inline RankInfo record_of_other(std::uint16_t port) {
  RankInfo record;
  record.host = "b1";
  record.machine = machine_identity();
  record.user = std::to_string(::getuid());
  record.shared_memory_bytes = segment_bytes;
  record.transport = Transport::tcp;
  record.rails = {{"lo", "127.0.0.1", port, port}};
  return record;
}

// What rank 0 does with the records of `size` ranks, once all are there. Returns what it wrote.
inline std::string pass_on_records(Store& store, int size) {
  FieldWriter writer;
  writer.add(encode_success());
  for (int rank = 0; rank < size; ++rank) writer.add(store.get("world/rank/" + std::to_string(rank), 5s));
  const std::string records = writer.take();
  store.set("world/records", records);
  return records;
}

struct Outcome {
  std::optional<Mesh> mesh;
  std::optional<ErrorKind> kind;
  std::string message;
  ErrorContext context;
};

// Runs `size` ranks; `change` edits a rank's options and may say that it does not take part.
inline std::vector<Outcome> run_ranks(int size, const CommunicatorOptions& base,
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

inline void send_byte(const Connection& socket, char byte) { CHECK(::send(socket.fd.get(), &byte, 1, 0) == 1); }

inline char receive_byte(const Connection& socket) {
  char byte = 0;
  for (int tries = 0; tries < 2000; ++tries) {
    if (::recv(socket.fd.get(), &byte, 1, 0) == 1) return byte;
    std::this_thread::sleep_for(1ms);
  }
  return 0;
}

// Every socket of every pair leads to its twin, with the same purpose and rail.
inline void check_pairs(std::vector<Outcome>& outcomes, bool expect_shm, std::size_t rails) {
  for (const auto& outcome : outcomes) {
    if (!outcome.mesh) std::fprintf(stderr, "%s\n", outcome.message.c_str());
    CHECK(outcome.mesh.has_value());
    if (!outcome.mesh) return;
  }
  const auto size = outcomes.size();
  for (std::size_t a = 0; a < size; ++a) {
    CHECK(outcomes[a].mesh->peers.size() == size && outcomes[a].mesh->hosts.size() == size);
    for (std::size_t b = 0; b < a; ++b) {
      auto& left = outcomes[a].mesh->peers[b];
      auto& right = outcomes[b].mesh->peers[a];
      CHECK(left.peer == static_cast<int>(b) && right.peer == static_cast<int>(a));
      CHECK(left.uses_shared_memory() == expect_shm && right.uses_shared_memory() == expect_shm);
      std::vector<std::pair<Connection*, Connection*>> pairs;
      CHECK(left.control.size() == (expect_shm ? 1 : rails) && right.control.size() == left.control.size());
      for (std::size_t i = 0; i < left.control.size(); ++i) pairs.emplace_back(&left.control[i], &right.control[i]);
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
      auto* mine = static_cast<char*>(
          ::mmap(nullptr, segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, left.shared_memory.get(), 0));
      auto* theirs = static_cast<char*>(
          ::mmap(nullptr, segment_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, right.shared_memory.get(), 0));
      CHECK(mine != MAP_FAILED && theirs != MAP_FAILED && mine[7] == 0);
      mine[7] = 42;
      CHECK(theirs[7] == 42);
      ::munmap(mine, segment_bytes);
      ::munmap(theirs, segment_bytes);
    }
  }
}

inline void check_all_fail(const std::vector<Outcome>& outcomes, ErrorKind kind, const std::vector<std::string>& parts,
                           int absent = -1) {
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (static_cast<int>(rank) == absent) continue;
    const auto& outcome = outcomes[rank];
    CHECK(outcome.kind == kind);
    for (const auto& part : parts) CHECK(contains(outcome.message, part));
  }
}

// Runs the tests whose name is given, or all.
inline int run_tests(const char* program, const std::vector<std::pair<std::string, void (*)()>>& tests, int argc,
                     char** argv) {
  for (const auto& [name, test] : tests) {
    if (argc > 1 && name != argv[1]) continue;
    const auto started = Clock::now();
    test();
    std::printf("%s: %.2f s\n", name.c_str(), std::chrono::duration<double>(Clock::now() - started).count());
  }
  return result(program);
}

}  // namespace holmes::test
