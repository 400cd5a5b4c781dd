// RailRate, ConnectionBound and BbrStart: what they learn, with numbers of the test's own.
#include <cstdio>

#include "check.hpp"
#include "holmes/transport/rail.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr double bytes_per_ms = 125'000;  // 1 Gbit/s

bool is_near(std::optional<double> rate, double expected) {
  return rate && *rate > expected * 0.95 && *rate < expected * 1.05;
}

// `milliseconds` of a busy rail that delivers at `share` of 1 Gbit/s.
void run_busy(RailRate& rate, Clock::time_point& now, double& acknowledged, int milliseconds, double share) {
  for (int i = 0; i < milliseconds; ++i) {
    now += 1ms;
    acknowledged += bytes_per_ms * share;
    if (rate.is_due(now)) rate.observe(now, static_cast<std::uint64_t>(acknowledged), true);
  }
}

void learns_from_busy_windows() {
  RailRate rate;
  Clock::time_point now{};
  double acknowledged = 0;
  CHECK(!rate.bytes_per_s());
  rate.start(now, 0);
  run_busy(rate, now, acknowledged, 5, 1.0);
  CHECK(is_near(rate.bytes_per_s(), 125e6));
  run_busy(rate, now, acknowledged, 200, 0.25);  // the link became slower
  CHECK(is_near(rate.bytes_per_s(), 125e6 / 4));
  run_busy(rate, now, acknowledged, 200, 1.0);
  CHECK(is_near(rate.bytes_per_s(), 125e6));
}

void small_messages_tell_nothing() {
  RailRate rate;
  Clock::time_point now{};
  rate.start(now, 0);
  rate.observe(now + 40ms, 64, false);  // a delayed acknowledgement
  CHECK(!rate.bytes_per_s());
}

// A busy processor acknowledges late: that is no slow rail.
void a_pause_at_the_beginning_tells_nothing() {
  RailRate rate;
  Clock::time_point now{};
  double acknowledged = 0;
  rate.start(now, 0);
  run_busy(rate, now, acknowledged, 20, 0.0);
  CHECK(!rate.bytes_per_s());
  run_busy(rate, now, acknowledged, 80, 1.0);
  CHECK(rate.bytes_per_s() && *rate.bytes_per_s() > 100e6);
}

void a_rail_that_carries_next_to_nothing_is_known_in_time() {
  RailRate rate;
  Clock::time_point now{};
  double acknowledged = 0;
  rate.start(now, 0);
  run_busy(rate, now, acknowledged, 100, 0.001);
  CHECK(is_near(rate.bytes_per_s(), 125e3));
}

void a_run_that_ended_early_only_raises() {
  RailRate rate;
  Clock::time_point now{};
  double acknowledged = 0;
  rate.start(now, 0);
  run_busy(rate, now, acknowledged, 5, 0.1);
  const double slow = *rate.bytes_per_s();
  const auto base = static_cast<std::uint64_t>(acknowledged);
  rate.observe(now, base, false);
  rate.start(now, base);
  rate.observe(now + 100ms, base + 100'000, false);  // looked at late
  CHECK(rate.bytes_per_s() == slow);
  rate.start(now, base);
  rate.observe(now + 5ms, base + 500'000, false);
  CHECK(is_near(rate.bytes_per_s(), 100e6));
}

void a_peer_that_does_not_read_is_disregarded() {
  RailRate rate;
  Clock::time_point now{};
  double acknowledged = 0;
  rate.start(now, 0);
  run_busy(rate, now, acknowledged, 5, 1.0);
  rate.disregard(now + 500ms, static_cast<std::uint64_t>(acknowledged), true);
  CHECK(!rate.is_due(now + 500ms));
  CHECK(is_near(rate.bytes_per_s(), 125e6));
}

// Acknowledgements of a far rail come at once for each round trip, and a lost packet holds them up for another one.
void a_far_rail_is_measured_over_its_round_trip() {
  RailRate rate;
  Clock::time_point now{};
  std::uint64_t acknowledged = 0;
  rate.set_round_trip(80ms);
  rate.start(now, 0);
  const auto round_trips = [&](int count, std::uint64_t bytes) {
    for (int i = 0; i < count * 80; ++i) {
      now += 1ms;
      if (i % 80 == 40) acknowledged += bytes;
      if (rate.is_due(now)) rate.observe(now, acknowledged, true);
    }
  };
  for (int i = 0; i < 15; ++i) {  // nothing can have come back yet, or little
    now += 10ms;
    if (rate.is_due(now)) rate.observe(now, acknowledged, true);
  }
  CHECK(!rate.bytes_per_s());
  round_trips(20, 10'000'000);
  CHECK(is_near(rate.bytes_per_s(), 125e6));
  round_trips(1, 0);
  CHECK(*rate.bytes_per_s() > 125e6 / 2);
  rate.set_round_trip(100us);  // near: windows as ever
  const auto before = now;
  rate.disregard(now, acknowledged, true);
  CHECK(!rate.is_due(before + RailRate::window / 2) && rate.is_due(before + RailRate::window));
}

constexpr std::size_t all = 6'000'000;

// Whether the buffer is found to be the limit after so many looks at a path of 80 ms.
bool is_buffer_after(int looks, ConnectionLook look) {
  ConnectionBound bound;
  look.shortest = 80ms;
  for (int i = 0; i < looks; ++i) bound.observe(Clock::now(), look);
  return bound.is_buffer();
}

void what_limits_a_connection_is_known() {
  constexpr int few = ConnectionBound::telling_looks;
  const ConnectionLook buffer{.is_full = true, .unsent_bytes = 0, .under_way_bytes = all, .round_trip = 85ms};
  const auto with = [&buffer](auto change) {
    ConnectionLook look = buffer;
    change(look);
    return look;
  };
  struct Row {
    const char* name;
    ConnectionLook look;
    int looks;
    bool expected;
  };
  const Row rows[] = {
      {"for too short", buffer, few - 1, false},
      {"the buffer", buffer, few, true},
      {"all that is to be sent is under way", with([](ConnectionLook& look) { look.is_full = false; }), 100, false},
      {"the path, which has a queue", with([](ConnectionLook& look) { look.round_trip = 110ms; }), 100, false},
      {"the window", with([](ConnectionLook& look) { look.unsent_bytes = all / 2; }), 100, false},
  };
  for (const Row& row : rows) {
    if (is_buffer_after(row.looks, row.look) == row.expected) continue;
    std::fprintf(stderr, "%s\n", row.name);
    CHECK(false);
  }
}

void what_is_now_and_then_is_no_limit() {
  const auto now = Clock::now();
  ConnectionBound buffer;
  for (int i = 0; i < 100; ++i)
    buffer.observe(
        now, {.is_full = true, .under_way_bytes = all, .round_trip = i % 3 == 2 ? 110ms : 81ms, .shortest = 80ms});
  CHECK(!buffer.is_buffer());
  CHECK(!buffer.is_due(now + 79ms, 80ms) && buffer.is_due(now + 80ms, 80ms));
}

void a_start_that_does_not_end_is_held() {
  constexpr auto as_before = std::nullopt;
  constexpr std::uint64_t rate = 25'000'000;
  const BbrLook starting{.is_starting = true, .bytes_per_s = rate}, ended{.is_starting = false, .bytes_per_s = rate};
  BbrStart start;
  for (int i = 0; i < 100; ++i) CHECK(start.observe(starting, false) == as_before);
  for (std::uint64_t found = rate / 64; found < rate; found *= 2)  // it finds more yet
    for (int i = 1; i < BbrStart::telling_looks; ++i)
      CHECK(start.observe({.is_starting = true, .bytes_per_s = found}, true) == as_before);
  for (int i = 1; i < BbrStart::telling_looks; ++i) CHECK(start.observe(starting, true) == as_before);
  CHECK(start.observe(starting, false) == as_before);  // a message's end
  CHECK(start.observe(starting, true) == rate);
  CHECK(start.observe(starting, true) == as_before);
  CHECK(start.observe(ended, true) == BbrStart::no_limit);
  for (int i = 0; i < 100; ++i) CHECK(start.observe(ended, true) == as_before);
  // Where too little is sent for it to end, it is not held for ever.
  for (int round = 0; round < 2; ++round) {
    for (int i = 1; i < BbrStart::telling_looks; ++i) CHECK(start.observe(starting, true) == as_before);
    CHECK(start.observe(starting, true) == rate);
    for (int i = 1; i < BbrStart::longest_held_looks; ++i) CHECK(start.observe(starting, false) == as_before);
    CHECK(start.observe(starting, false) == BbrStart::no_limit);
  }
  CHECK(start.observe({.is_starting = true}, true) == as_before);  // nothing is known yet
}

}  // namespace

int main() {
  what_limits_a_connection_is_known();
  what_is_now_and_then_is_no_limit();
  a_start_that_does_not_end_is_held();
  learns_from_busy_windows();
  small_messages_tell_nothing();
  a_pause_at_the_beginning_tells_nothing();
  a_rail_that_carries_next_to_nothing_is_known_in_time();
  a_run_that_ended_early_only_raises();
  a_peer_that_does_not_read_is_disregarded();
  a_far_rail_is_measured_over_its_round_trip();
  return result("rail_rate");
}
