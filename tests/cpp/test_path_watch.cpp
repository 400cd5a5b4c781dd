// PathRate: when it knows what a path carries, and which changes it tells.
#include <cmath>

#include "check.hpp"
#include "holmes/transport/path_watch.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

struct Path {
  PathRate rate;
  int changes = 0;
  double before = 0;

  // So many measurements, which waver by a tenth.
  void run(int count, double megabytes_per_s) {
    for (int i = 0; i < count; ++i) {
      const auto changed = rate.observe(megabytes_per_s * (1 + 0.1 * (i % 3 - 1)) * 1e6);
      if (!changed) continue;
      ++changes;
      before = *changed;
    }
  }
  bool carries(double megabytes_per_s) const {
    const auto found = rate.bytes_per_s();
    return found && std::lround(*found) == std::lround(megabytes_per_s * 1e6);
  }
};

void tells_each_change_once() {
  Path path;
  path.run(8, 20);
  CHECK(!path.rate.bytes_per_s());
  path.run(10, 20);
  CHECK(path.carries(20));
  CHECK(path.changes == 0);
  path.run(9, 10);
  CHECK(path.carries(10));
  CHECK(path.changes == 1);
  CHECK(std::lround(path.before) == 20'000'000);
  path.run(1000, 10);
  CHECK(path.changes == 1);
  path.run(9, 20);
  CHECK(path.carries(20));
  CHECK(path.changes == 2);
}

void tells_no_start_and_no_burst() {
  Path path;
  for (double rate = 0.1; rate < 20; rate *= 2) path.run(3, rate);  // a window that opens
  path.run(40, 20);
  CHECK(path.changes == 0);
  CHECK(path.carries(20));
  for (int i = 0; i < 20; ++i) {
    path.run(4, 5);
    path.run(2, 95);
    path.run(10 + i, 20);
  }
  CHECK(path.changes == 0);
  path.run(40, 15);
  path.run(40, 25);
  CHECK(path.changes == 0);
}

void adds_up_what_comes_slowly() {
  Path path;
  for (double rate = 20; rate > 9; rate *= 0.97) path.run(9, rate);
  CHECK(path.changes == 1);
}

}  // namespace

int main() {
  tells_each_change_once();
  tells_no_start_and_no_burst();
  adds_up_what_comes_slowly();
  return result("path_watch");
}
