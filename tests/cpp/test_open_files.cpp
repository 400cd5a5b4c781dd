// A communicator whose sockets are more than the soft limit of open files: the limit is raised, once.
#include "holmes/core/descriptors.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr rlim_t few = 64;

rlimit limit_now() {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  return limit;
}

void set_limit(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

// Where the hard limit is as low, nothing changes and nothing fails. In a child, since it cannot be raised again.
void test_hard_limit() {
  const pid_t child = ::fork();
  if (child == 0) {
    set_limit(few, few);
    raise_open_files_limit();
    ::_exit(limit_now().rlim_cur == few ? 0 : 1);
  }
  int status = 1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
}

void test_raised_for_communicator() {
  const rlim_t hard = limit_now().rlim_max;
  set_limit(few, hard);
  constexpr int ranks = 16;  // 720 sockets in this process
  run_communicators(ranks, Transport::tcp, [](Communicator& comm) { comm.barrier()->wait(); });
  CHECK(limit_now().rlim_cur == std::min<rlim_t>(hard, most_open_files));
}

void test_once() {
  set_limit(few, limit_now().rlim_max);
  raise_open_files_limit();
  CHECK(limit_now().rlim_cur == few);
}

}  // namespace

int main() {
  test_hard_limit();
  test_raised_for_communicator();
  test_once();
  std::printf("test_open_files: passed\n");
}
