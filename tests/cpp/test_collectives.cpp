// Every operation of the host communicator, over TCP and shared memory, 1 to 5 ranks, sizes around every threshold.
#include "collective_checks.hpp"

using namespace holmes;
using namespace holmes::test;

int main() {
  for (int size = 1; size <= 5; ++size) {
    run_communicators(size, Transport::tcp, check_everything);
    run_communicators(size, Transport::automatic, check_everything);
    run_communicators(size, Transport::tcp, check_everything, 3);
    std::printf("%d ranks over TCP, shared memory and three rails: ok\n", size);
  }
  return 0;
}
