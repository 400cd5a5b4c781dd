// What tests of RDMA share: the stand-in for libibverbs and its settings, options, and messages checked byte by byte.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <thread>
#include <vector>

#include "collective_checks.hpp"
#include "fake_verbs.hpp"

namespace holmes::test {

using namespace std::chrono_literals;

struct Fake {
  decltype(&fake_verbs_set) set;
  decltype(&fake_verbs_objects) objects;
  decltype(&fake_verbs_posted) posted;
  decltype(&fake_verbs_posts) posts;
  decltype(&fake_verbs_answered) answered;
  decltype(&fake_verbs_events) events;
  decltype(&fake_verbs_read_bytes) read_bytes;
  decltype(&fake_verbs_device_bytes) device_bytes;
  decltype(&fake_verbs_told) told;
  decltype(&fake_verbs_untold) untold;
  decltype(&fake_verbs_pinned_out_bytes) pinned_out_bytes;
  decltype(&fake_verbs_pinned_in_bytes) pinned_in_bytes;
  decltype(&fake_verbs_gpu_out_bytes) gpu_out_bytes;
  decltype(&fake_verbs_gpu_in_bytes) gpu_in_bytes;
  decltype(&fake_verbs_registrations) registrations;
  decltype(&fake_verbs_registered_bytes) registered_bytes;
};

inline const Fake& fake() {
  static const Fake found = [] {
    void* const handle = ::dlopen(std::getenv("HOLMES_VERBS_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
    CHECK(handle != nullptr);
    return Fake{
        reinterpret_cast<decltype(&fake_verbs_set)>(::dlsym(handle, "fake_verbs_set")),
        reinterpret_cast<decltype(&fake_verbs_objects)>(::dlsym(handle, "fake_verbs_objects")),
        reinterpret_cast<decltype(&fake_verbs_posted)>(::dlsym(handle, "fake_verbs_posted")),
        reinterpret_cast<decltype(&fake_verbs_posts)>(::dlsym(handle, "fake_verbs_posts")),
        reinterpret_cast<decltype(&fake_verbs_answered)>(::dlsym(handle, "fake_verbs_answered")),
        reinterpret_cast<decltype(&fake_verbs_events)>(::dlsym(handle, "fake_verbs_events")),
        reinterpret_cast<decltype(&fake_verbs_read_bytes)>(::dlsym(handle, "fake_verbs_read_bytes")),
        reinterpret_cast<decltype(&fake_verbs_device_bytes)>(::dlsym(handle, "fake_verbs_device_bytes")),
        reinterpret_cast<decltype(&fake_verbs_told)>(::dlsym(handle, "fake_verbs_told")),
        reinterpret_cast<decltype(&fake_verbs_untold)>(::dlsym(handle, "fake_verbs_untold")),
        reinterpret_cast<decltype(&fake_verbs_pinned_out_bytes)>(::dlsym(handle, "fake_verbs_pinned_out_bytes")),
        reinterpret_cast<decltype(&fake_verbs_pinned_in_bytes)>(::dlsym(handle, "fake_verbs_pinned_in_bytes")),
        reinterpret_cast<decltype(&fake_verbs_gpu_out_bytes)>(::dlsym(handle, "fake_verbs_gpu_out_bytes")),
        reinterpret_cast<decltype(&fake_verbs_gpu_in_bytes)>(::dlsym(handle, "fake_verbs_gpu_in_bytes")),
        reinterpret_cast<decltype(&fake_verbs_registrations)>(::dlsym(handle, "fake_verbs_registrations")),
        reinterpret_cast<decltype(&fake_verbs_registered_bytes)>(::dlsym(handle, "fake_verbs_registered_bytes"))};
  }();
  return found;
}

// The I/O thread may be the last to let go of a communicator.
inline void check_nothing_left() {
  for (const auto until = Clock::now() + 5s; fake().objects() != 0 && Clock::now() < until;) std::this_thread::yield();
  CHECK(fake().objects() == 0 && fake().untold() == 0);
}

inline void check_contains(const std::string& text, const std::string& part) { CHECK(contains(text, part)); }

inline CommunicatorOptions options_of(int rank, int size, const char* name = "test") {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.name = name;
  options.transport = Transport::rdma;
  options.nics = {{"lo", "127.0.0.1"}};
  options.rdma_ports = {rdma_port(rank)};
  options.secret = "the secret of the job";
  options.connect_timeout = 20s;
  return options;
}

// What `body` writes to stderr; all the same to stderr where it aborts.
inline std::string told_by(const std::function<void()>& body) {
  std::fflush(stderr);
  static int before = -1;
  static int file = -1;
  before = ::dup(STDERR_FILENO);
  file = ::memfd_create("stderr", MFD_CLOEXEC);
  ::fcntl(file, F_SETFL, O_APPEND);  // threads write it
  ::dup2(file, STDERR_FILENO);
  std::signal(SIGABRT, [](int) {
    char text[4096];
    for (off_t at = 0; const ssize_t count = ::pread(file, text, sizeof text, at); at += count)
      if (count < 0 || ::write(before, text, static_cast<std::size_t>(count)) != count) break;
  });
  body();
  std::fflush(stderr);
  ::dup2(before, STDERR_FILENO);
  std::signal(SIGABRT, SIG_DFL);
  ::close(before);
  std::string text(static_cast<std::size_t>(::lseek(file, 0, SEEK_END)), ' ');
  CHECK(::pread(file, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  ::close(file);
  return text;
}

using Bytes = std::vector<std::uint8_t>;

// Other bytes in each message, and in no two places of one that a mistake could mix up.
OWN_MEMORY inline void fill_message(std::uint8_t* to, std::size_t bytes, std::size_t number) {
  for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::uint8_t>(number * 31 + i + (i >> 8) + (i >> 16));
}

inline Bytes message(std::size_t bytes, std::size_t number) {
  Bytes data(bytes);
  fill_message(data.data(), bytes, number);
  return data;
}

OWN_MEMORY inline void take_greater(std::uint8_t* to, const std::uint8_t* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) to[i] = from[i] > to[i] ? from[i] : to[i];
}

// Every collective that moves much, with what each rank gets checked byte by byte.
inline void check_large_collectives(Communicator& comm) {
  const auto size = static_cast<std::size_t>(comm.size());
  const auto own = static_cast<std::size_t>(comm.rank());
  for (const std::size_t bytes : {std::size_t{3 << 20} + 64, std::size_t{1200028}, std::size_t{600000}}) {
    for (int round = 0; round < 2; ++round) {
      std::vector<Bytes> all;
      for (std::size_t rank = 0; rank < size; ++rank) all.push_back(message(bytes, rank));
      Bytes data = all[own];
      comm.all_reduce(buffer(data, DType::uint8), ReduceOp::max, {})->wait();
      Bytes greatest = all[0];
      for (const Bytes& one : all) take_greater(greatest.data(), one.data(), bytes);
      CHECK(data == greatest);
      std::vector<Bytes> gathered(size, Bytes(bytes));
      std::vector<Buffer> outputs;
      for (Bytes& one : gathered) outputs.push_back(buffer(one, DType::uint8));
      comm.all_gather(outputs, buffer(all[own], DType::uint8), {})->wait();
      CHECK(gathered == all);
      for (int root = 0; root < comm.size(); ++root) {
        data = all[own];
        comm.broadcast(buffer(data, DType::uint8), root, {})->wait();
        CHECK(data == all[static_cast<std::size_t>(root)]);
        data = all[own];
        comm.reduce(buffer(data, DType::uint8), root, ReduceOp::max, {})->wait();
        CHECK(comm.rank() != root || data == greatest);
      }
    }
  }
}

}  // namespace holmes::test
