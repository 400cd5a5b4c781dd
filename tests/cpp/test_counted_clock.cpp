// The clock between two looks at the system's: beside it whatever becomes of the counter, never back, with few looks.
#include <array>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "holmes/core/clock.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

// A machine whose time goes on by what the program does.
struct Machine {
  std::int64_t time = 1'000'000'000'000;
  std::uint64_t counter = 77;
  double per_ns = 2.1;
  double part = 0;  // of a count
  std::int64_t look_ns = 15'000;
  int looks = 0;

  void pass(std::int64_t ns) {
    time += ns;
    part += static_cast<double>(ns) * per_ns;
    counter += static_cast<std::uint64_t>(part);
    part -= static_cast<double>(static_cast<std::uint64_t>(part));
  }
  std::int64_t read(CountedClock& clock) {
    return clock.now([this] { return counter; },
                     [this] {
                       ++looks;
                       pass(look_ns / 2);
                       const std::int64_t seen = time;
                       pass(look_ns - look_ns / 2);
                       return seen;
                     });
  }
};

// Reads every few microseconds for `ns`; returns how far from the machine's time any of them was.
std::int64_t worst_of(Machine& machine, CountedClock& clock, std::int64_t ns, std::mt19937_64& random) {
  std::int64_t worst = 0;
  std::int64_t last = 0;
  for (const std::int64_t end = machine.time + ns; machine.time < end;) {
    machine.pass(static_cast<std::int64_t>(random() % 10'000));
    const std::int64_t before = machine.time;
    const std::int64_t read = machine.read(clock);
    CHECK(read >= last);
    last = read;
    worst = std::max({worst, before - read, read - machine.time});
  }
  return worst;
}

void check_beside_the_systems() {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    std::mt19937_64 random(seed);
    Machine machine;
    machine.per_ns = std::array{0.001, 0.7, 2.1, 5.0, 1.0}[seed - 1];
    CountedClock clock;
    worst_of(machine, clock, 20'000'000, random);
    machine.looks = 0;
    CHECK(worst_of(machine, clock, 1'000'000'000, random) < 25'000);
    CHECK(machine.looks >= 180 && machine.looks <= 220);  // one each 5 ms
  }
}

// Wrong for 5 ms at most, and right again afterwards.
void check_counters_that_jump() {
  std::mt19937_64 random(11);
  for (int number = 0; number < 60; ++number) {
    Machine machine;
    CountedClock clock;
    worst_of(machine, clock, 20'000'000 + static_cast<std::int64_t>(random() % 3'000'000), random);
    switch (number % 6) {
      case 0:
        machine.counter = 5;
        break;  // the machine slept
      case 1:
        machine.counter -= 1'000'000'000;
        break;  // another processor's
      case 2:
        machine.counter += 1'500'000;
        break;  // the same, by less than is believed
      case 3:
        machine.counter += 1ULL << 62;
        break;
      case 4:
        machine.per_ns *= 3;
        break;  // a counter that was not steady
      default:
        machine.per_ns /= 3;
    }
    CHECK(worst_of(machine, clock, 50'000'000, random) < 15'000'000);  // three times as fast for so long
    worst_of(machine, clock, 50'000'000, random);
    CHECK(worst_of(machine, clock, 50'000'000, random) < 25'000);
  }
}

// A thread that did not run while it looked knows no rate by that.
void check_looks_that_take_long() {
  std::mt19937_64 random(12);
  Machine machine;
  CountedClock clock;
  for (int number = 0; number < 200; ++number) {
    machine.look_ns = number % 3 == 0 ? 8'000'000 : 15'000;
    worst_of(machine, clock, 7'000'000, random);
  }
  machine.look_ns = 15'000;
  worst_of(machine, clock, 50'000'000, random);
  CHECK(worst_of(machine, clock, 100'000'000, random) < 25'000);
}

// A counter that stands still is never believed for long.
void check_a_counter_that_stands() {
  Machine machine;
  machine.per_ns = 0;
  CountedClock clock;
  std::mt19937_64 random(13);
  CHECK(worst_of(machine, clock, 100'000'000, random) <= machine.look_ns);
}

// This machine's own, from several threads: each between two looks at the system's clock, but for what the rate may be
// wrong by.
void check_this_machine() {
  if (!has_steady_counter()) return;
  std::vector<std::thread> threads;
  for (int number = 0; number < 3; ++number)
    threads.emplace_back([] {
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
      Clock::time_point last{};
      while (true) {
        const auto before = std::chrono::steady_clock::now();
        const auto read = counted_now();
        const auto after = std::chrono::steady_clock::now();
        CHECK(read >= last);
        last = read;
        CHECK(before - read < std::chrono::milliseconds(50) && read - after < std::chrono::milliseconds(50));
        if (after > end) return;
      }
    });
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  check_beside_the_systems();
  check_counters_that_jump();
  check_looks_that_take_long();
  check_a_counter_that_stands();
  check_this_machine();
  std::printf("counted clock: ok\n");
  return 0;
}
