// The engine's promises to the threads that drive it.
#include "holmes/engine/engine.hpp"

#include "check.hpp"
#include "holmes/core/descriptors.hpp"
#include "holmes/engine/io_thread.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

std::shared_ptr<Engine> lone_engine() {
  auto group = std::make_unique<Group>();
  group->name = "lone";
  group->channels.resize(1);
  group->controls.resize(1);
  std::vector<std::unique_ptr<Channel>> p2p(1);
  return std::make_shared<Engine>(std::move(group), std::move(p2p), "rank 0 (host here)", Duration::zero(),
                                  io_thread_for(Env{}, ""), event_fd(), std::vector<int>{});
}

// The driver looks at its work, then at the deadlines (which may end the communicator, and the work with it), then asks
// whether to sleep: nothing wakes it from that any more.
void check_dead_engine_is_not_waited_for() {
  const auto engine = lone_engine();
  std::vector<pollfd> fds;
  {
    std::lock_guard drive(engine->drive_lock());
    CHECK(engine->prepare_wait(fds));
    CHECK(fds.size() == 2);  // peers and somebody here can wake it
  }
  engine->abort("a test ends it");
  CHECK(engine->is_dead());
  fds.clear();
  std::lock_guard drive(engine->drive_lock());
  CHECK(!engine->prepare_wait(fds));
}

}  // namespace

int main() {
  check_dead_engine_is_not_waited_for();
  return result("test_engine");
}
