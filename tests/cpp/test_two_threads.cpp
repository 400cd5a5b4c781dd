// Two threads of one rank use one communicator: what one submits moves at once, also while the other sleeps in an
// operation that waits for a peer.
#include <thread>

#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr auto asleep_after = std::chrono::milliseconds(100);  // much longer than a waiting thread spins
constexpr auto at_once = std::chrono::seconds(5);              // much shorter than the operations' timeout

// Rank 1 enters the all_reduce only when it has got the message.
void check_message_past_a_waiting_collective(Communicator& comm, bool async) {
  std::vector<float> data(1000, 1);
  std::vector<float> message(1000, 2);
  if (comm.rank() == 1) {
    comm.recv(buffer(message, DType::float32), 0, 3)->wait();
    comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait();
    return;
  }
  std::thread waiting([&] { comm.all_reduce(buffer(data, DType::float32), ReduceOp::sum)->wait(); });
  std::this_thread::sleep_for(asleep_after);
  const auto start = Clock::now();
  comm.send(buffer(message, DType::float32), 1, 3, {.timeout = {}, .async = async})->wait();
  waiting.join();
  CHECK(Clock::now() - start < at_once);
  CHECK(data.front() == 2 && data.back() == 2);
}

}  // namespace

int main() {
  for (const Transport transport : {Transport::tcp, Transport::automatic})
    for (const bool async : {false, true})
      run_communicators(2, transport, [&](Communicator& comm) {
        for (int i = 0; i < 3; ++i) check_message_past_a_waiting_collective(comm, async);
      });
  return 0;
}
