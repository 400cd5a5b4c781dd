// What the sources of the fake NCCL share: its communicator, result codes, last error.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "wire.hpp"

namespace fake_nccl {

inline constexpr int version = FAKE_NCCL_VERSION;
inline constexpr int success = 0, system_error = 2, internal_error = 3, invalid_argument = 4, invalid_usage = 5,
                     remote_error = 6, in_progress = 7;

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
  sockaddr_in root{};
  int shrinks = 0;
  std::string root_file;  // of a shrink
  std::vector<int> sockets;
  std::set<void*> registered;
  std::atomic<int> state{fake_nccl::in_progress};
  std::atomic<bool> stop{false};
  std::thread setup;
  std::atomic<int> running{0};
  std::map<int, double> scales;  // of premultiplied sums
  int next_op = 5;
};

namespace fake_nccl {

// Returns `result` and keeps `text`, which says what is at fault, for ncclGetLastError.
int fail(int result, const std::string& text);
// Whether FAKE_NCCL_FAULT names this fault of this rank.
bool has_fault(const ncclComm& comm, const std::string& name);

}  // namespace fake_nccl
