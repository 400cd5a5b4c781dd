// Ranks as threads over an in-memory store, and checks that name what failed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "holmes/comm/communicator.hpp"

namespace holmes::test {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

inline bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return found;
}

// Runs `body(rank)` in `size` threads. An exception that leaves a body fails the test.
inline void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, error.what());
        std::abort();
      }
    });
  for (auto& thread : threads) thread.join();
}

// Ranks use two by turns: those of tests/fake_verbs, or real ones.
inline std::string rdma_port(int rank) {
  const char* const given = std::getenv("HOLMES_TEST_RDMA_PORTS");
  const std::string ports = given ? given : "fake0:1,fake1:1";
  const auto comma = ports.find(',');
  return rank % 2 == 0 ? ports.substr(0, comma) : ports.substr(comma + 1);
}

// `body(communicator)` on every one of `size` thread ranks.
inline void run_communicators(int size, Transport transport, const std::function<void(Communicator&)>& body,
                              int rails = 1, Duration timeout = std::chrono::seconds(60), TlsMode tls = TlsMode::off) {
  const auto store = make_local_store();
  run_ranks(size, [&](int rank) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.name = "test";
    options.transport = transport;
    options.timeout = timeout;
    options.tls = tls;
    options.secret = "the secret of the job";
    options.connect_timeout = std::chrono::seconds(20);
    for (int rail = 1; rail <= rails && transport == Transport::tcp; ++rail)
      options.nics.push_back({"lo", "127.0.0." + std::to_string(rail)});
    if (transport == Transport::rdma) {
      options.nics = {{"lo", "127.0.0.1"}};
      options.rdma_ports = {rdma_port(rank)};
    }
    const auto communicator = make_communicator(store, options);
    body(*communicator);
  });
}

template <typename T>
Buffer buffer(std::vector<T>& values, DType dtype) {
  return {values.data(), values.size(), dtype, nullptr};
}

template <typename T>
Buffer part(std::vector<T>& values, std::size_t begin, std::size_t count, DType dtype) {
  return {values.data() + begin, count, dtype, nullptr};
}

}  // namespace holmes::test
