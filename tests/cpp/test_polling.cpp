// Who waits polls for what can come that way, and not beside what is there already: it would leave the processor to
// others, and burn its own time, for as long as it may poll. And it wakes no other thread for what it drives itself.
#include <sched.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <atomic>

#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// How often this thread has polled and found nothing.
thread_local std::uint64_t yields = 0;
// How often work was left to an I/O thread, or taken back from it.
std::atomic<std::uint64_t> timers = 0;

}  // namespace

// In place of the C library's, for the engine too.
extern "C" int sched_yield() noexcept {
  ++yields;
  return static_cast<int>(::syscall(SYS_sched_yield));
}

extern "C" int timerfd_settime(int fd, int flags, const itimerspec* at, itimerspec* before) noexcept {
  ++timers;
  return static_cast<int>(::syscall(SYS_timerfd_settime, fd, flags, at, before));
}

namespace {

void send(Communicator& comm, std::int64_t value, std::uint32_t tag, std::size_t count = 1) {
  std::vector<std::int64_t> data(count, value);
  comm.send(buffer(data, DType::int64), 1, tag)->wait();
}

// Receives what is there already.
void recv_at_once(Communicator& comm, std::int64_t value, std::uint32_t tag, std::size_t count = 1) {
  std::vector<std::int64_t> data(count, -1);
  const std::uint64_t before = yields;
  comm.recv(buffer(data, DType::int64), 0, tag)->wait();
  CHECK(data == std::vector<std::int64_t>(count, value));
  CHECK(yields == before);
}

// A receive that was under way takes along what comes behind its own message.
void test_read_ahead() {
  run_communicators(2, Transport::shm, [](Communicator& comm) {
    constexpr int messages = 200;  // more than is read at once
    if (comm.rank() == 0) {
      for (int i = 0; i < messages; ++i) send(comm, i, 5, static_cast<std::size_t>(i % 7));
      comm.barrier()->wait();
      return;
    }
    CallOptions async;
    async.async = true;
    std::vector<std::int64_t> first;
    const WorkPtr posted = comm.recv(buffer(first, DType::int64), 0, 5, async);
    comm.barrier()->wait();
    posted->wait();
    for (int i = 1; i < messages; ++i) recv_at_once(comm, i, 5, static_cast<std::size_t>(i % 7));
  });
}

// What is wanted is behind a message of another tag, shorter or longer; and that one then comes as it was kept.
void test_other_tag_first() {
  run_communicators(2, Transport::shm, [](Communicator& comm) {
    for (const std::size_t count : {1, 50, 100}) {
      if (comm.rank() == 0) {
        send(comm, 1, 1, 50);
        send(comm, 2, 2, count);
        send(comm, 3, 2, count);
        comm.barrier()->wait();
      } else {
        comm.barrier()->wait();
        for (const std::int64_t value : {2, 3}) recv_at_once(comm, value, 2, count);
        recv_at_once(comm, 1, 1, 50);
      }
    }
  });
}

// A small one between two that the receiver copies out of the sender's memory, where it was sent together with them.
void test_beside_long_ones() {
  ::setenv("HOLMES_CMA", "always", 1);
  run_communicators(2, Transport::shm, [](Communicator& comm) {
    constexpr std::size_t count = 1 << 17;
    std::vector<std::int64_t> first(count, 1), second(1, 2), third(count, 3);
    for (int round = 0; round < 20; ++round) {
      if (comm.rank() == 0) {
        std::vector<P2pCall> calls;
        for (auto* data : {&first, &second, &third}) calls.push_back({true, buffer(*data, DType::int64), 1, 4});
        for (const WorkPtr& work : comm.batch(std::move(calls), {})) work->wait();
      } else {
        comm.recv(buffer(first, DType::int64), 0, 4)->wait();
        recv_at_once(comm, 2, 4);
        comm.recv(buffer(third, DType::int64), 0, 4)->wait();
        CHECK(first == std::vector<std::int64_t>(count, 1) && third == std::vector<std::int64_t>(count, 3));
      }
    }
  });
  ::unsetenv("HOLMES_CMA");
}

// Many messages of one call: between one that is done and the next the caller leaves nothing to another thread.
void test_one_thread_waits_for_all() {
  run_communicators(2, Transport::shm, [](Communicator& comm) {
    constexpr std::size_t count = 1 << 18;
    constexpr int messages = 8;
    const int peer = 1 - comm.rank();
    std::vector<std::vector<float>> sent(messages, std::vector<float>(count, static_cast<float>(comm.rank())));
    std::vector<std::vector<float>> received(messages, std::vector<float>(count, -1));
    comm.barrier()->wait();
    const std::uint64_t before = timers;
    for (int round = 0; round < 10; ++round) {
      std::vector<P2pCall> calls;
      for (auto& data : received) calls.push_back({false, buffer(data, DType::float32), peer, 3});
      for (auto& data : sent) calls.push_back({true, buffer(data, DType::float32), peer, 3});
      for (const WorkPtr& work : comm.batch(std::move(calls), {})) CHECK(work->is_final());
    }
    CHECK(timers == before);
    comm.barrier()->wait();
    CHECK(received.back() == std::vector<float>(count, static_cast<float>(peer)));
  });
}

}  // namespace

int main() {
  test_read_ahead();
  test_other_tag_first();
  test_beside_long_ones();
  test_one_thread_waits_for_all();
  std::puts("test_polling: all checks passed");
}
