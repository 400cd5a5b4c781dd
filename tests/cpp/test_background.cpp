// An asynchronous operation ends whether its caller waits at once, later, or never.
#include <thread>

#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

enum class Wait { at_once, later, never };

// Up to more than a socket or a ring takes before the peer reads.
constexpr std::size_t counts[] = {1, 1000, 100 * 1000, 1000 * 1000};
constexpr auto limit = std::chrono::seconds(20);

void end(const std::vector<WorkPtr>& works, Wait wait) {
  if (wait == Wait::later) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const auto until = Clock::now() + limit;
  for (const auto& work : works) {
    if (wait != Wait::never) work->wait();
    while (!work->is_final() && Clock::now() < until) std::this_thread::sleep_for(std::chrono::microseconds(100));
    CHECK(work->state() == WorkState::completed);
  }
}

void check(Communicator& comm, std::size_t count, Wait wait) {
  std::vector<float> data(count, 1);
  std::vector<float> sent(count, 2);
  std::vector<float> received(count);
  const CallOptions async{.timeout = {}, .async = true};
  const int peer = 1 - comm.rank();
  const WorkPtr recv = comm.recv(buffer(received, DType::float32), peer, 0, async);
  const WorkPtr send = comm.send(buffer(sent, DType::float32), peer, 0, async);
  end({recv, send}, wait);
  CHECK(received.front() == 2 && received.back() == 2);
  end({comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum, async)}, wait);
  CHECK(data.front() == 2 && data.back() == 2);
}

}  // namespace

int main() {
  for (const Transport transport : {Transport::tcp, Transport::automatic})
    run_communicators(2, transport, [](Communicator& comm) {
      for (int i = 0; i < 3; ++i)
        for (const std::size_t count : counts)
          for (const Wait wait : {Wait::at_once, Wait::later, Wait::never}) check(comm, count, wait);
    });
  return 0;
}
