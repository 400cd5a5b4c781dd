// What the sources of the fake NCCL share: its communicator, result codes, last error.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "plugin_net.hpp"
#include "wire.hpp"

namespace fake_nccl {

inline constexpr int version = FAKE_NCCL_VERSION;
inline constexpr int usual_ctas = 32;
inline constexpr int success = 0, unhandled_cuda_error = 1, system_error = 2, internal_error = 3, invalid_argument = 4,
                     invalid_usage = 5, remote_error = 6, in_progress = 7;

struct UniqueId {
  std::uint64_t magic;
  sockaddr_in root;
  char rest[128 - sizeof(std::uint64_t) - sizeof(sockaddr_in)];
};
static_assert(sizeof(UniqueId) == 128);

}  // namespace fake_nccl

struct ncclComm {
  int rank = 0;
  int size = 0;
  bool is_blocking = true;
  std::string net_name;
  int device = 0;
  int ctas = fake_nccl::usual_ctas;  // of each kernel
  sockaddr_in root{};
  int shrinks = 0;
  std::string root_file;  // of a shrink
  std::vector<int> sockets;
  std::unique_ptr<fake_nccl::PluginNet> plugin;  // for ranks of other hosts; null: sockets
  std::set<void*> registered;
  std::atomic<int> state{fake_nccl::in_progress};
  std::atomic<bool> stop{false};
  std::thread setup;
  std::thread group_end;       // of a group that is still in progress
  std::atomic<int> inside{0};  // threads that a call keeps
  std::atomic<int> running{0};
  // Each operation of a CUDA graph holds it.
  std::shared_ptr<int> graphs = std::make_shared<int>(0);
  // Behind the last operation outside of graphs, and of a capture: NCCL runs a communicator's operations in order.
  struct Last {
    void* stream = nullptr;
    void* end = nullptr;  // null: there was none
    unsigned long long capture_id = 0;
  };
  Last last, last_captured;
  std::string name = "?";  // NCCL_FAKE_NAME of its library, for the trace
  int kernel_us = 0;       // NCCL_FAKE_US: so long each kernel runs once its peers' are there
  long collectives = 0;    // that were launched
  std::map<int, long> sends, recvs;
  std::map<int, double> scales;  // of premultiplied sums
  int next_op = 5;
};

namespace fake_nccl {

// Returns `result` and keeps `text`, which says what is at fault, for ncclGetLastError.
int fail(int result, const std::string& text);
// Whether FAKE_NCCL_FAULT names this fault of this rank.
bool has_fault(const ncclComm& comm, const std::string& name);

}  // namespace fake_nccl
