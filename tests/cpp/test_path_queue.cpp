// PathQueue: which round trips it takes for a queue, on paths that vary too.
#include "holmes/transport/path_queue.hpp"

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr double target_s = 0.01;

struct Path {
  PathQueue queue{target_s};
  Clock::time_point now{1h};
  int looks = 0;
  int long_ones = 0;

  // So many looks; counts those that see a queue above the target.
  void look(int count, double round_trip_s, double variation_s) {
    for (int i = 0; i < count; ++i) {
      now += 100ms;
      ++looks;
      long_ones += queue.look(now, {round_trip_s, variation_s, round_trip_s}) > target_s;
    }
  }
  double long_share() {
    const double share = static_cast<double>(long_ones) / looks;
    looks = long_ones = 0;
    return share;
  }
};

void test_queue() {
  Path path;
  path.look(20, 0.02, 0.001);
  CHECK(path.long_share() == 0.0);
  path.look(30, 0.045, 0.001);
  CHECK(path.long_share() == 1.0);
  path.look(20, 0.025, 0.001);
  CHECK(path.long_share() == 0.0);
}

// Others never rest, or the path is a longer one.
void test_queue_that_stays() {
  Path path;
  path.look(20, 0.02, 0.001);
  path.look(60, 0.06, 0.001);
  CHECK(path.long_share() > 0.3);
  path.look(100, 0.06, 0.001);
  CHECK(path.long_share() == 0.0);
  path.look(10, 0.02, 0.001);
  path.look(10, 0.06, 0.001);
  CHECK(path.long_share() == 0.5);
}

// As measured: delays of 0 to 20 ms each way, in order. Few packets take what the one before leaves of that; many, as
// of a full path, all but the most of it; and bbr sends few for 0.2 s in every 10.
void test_path_that_varies() {
  Path path;
  path.look(10, 0.027, 0.013);
  for (int i = 0; i < 4; ++i) {
    path.look(98, 0.038, 0.001);
    path.look(2, 0.026, 0.008);
  }
  CHECK(path.long_share() < 0.2);
}

// Above the target on average only: no four seconds without a short one.
void test_path_that_wavers() {
  Path path;
  const auto waver = [&] {
    for (int i = 0; i < 100; ++i) {
      path.look(7, 0.112, 0.008);
      path.look(1, 0.098, 0.008);
    }
  };
  path.look(10, 0.08, 0.008);
  waver();
  path.long_share();
  waver();
  CHECK(path.long_share() < 0.2);
}

// What was under way before a pause tells nothing, and its time is none of a queue.
void test_rest() {
  Path path;
  path.look(20, 0.02, 0.001);
  path.look(20, 0.06, 0.001);
  path.now += 60s;
  path.queue.rest(path.now);
  path.long_share();
  path.look(20, 0.06, 0.001);
  CHECK(path.long_share() == 1.0);
}

}  // namespace

int main() {
  test_queue();
  test_queue_that_stays();
  test_path_that_varies();
  test_path_that_wavers();
  test_rest();
  return result("path_queue");
}
