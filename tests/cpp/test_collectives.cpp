// Every operation of the host communicator, over TCP, shared memory and TLS, 1 to 5 ranks, sizes around every
// threshold.
#include "collective_checks.hpp"

using namespace holmes;
using namespace holmes::test;

int main() {
  for (int size = 1; size <= 5; ++size) {
    run_communicators(size, Transport::tcp, [](Communicator& comm) { check_everything(comm); });
    run_communicators(size, Transport::automatic, [](Communicator& comm) { check_everything(comm); });
    run_communicators(size, Transport::tcp, [](Communicator& comm) { check_everything(comm); }, 3);
    for (int rails = 1; rails <= 3 && size % 2 == 0; rails += 2)
      run_communicators(
          size, Transport::tcp, [](Communicator& comm) { check_everything(comm); }, rails, std::chrono::seconds(60),
          TlsMode::all);
    std::printf("%d ranks over TCP, shared memory, three rails and TLS: ok\n", size);
  }
  return 0;
}
