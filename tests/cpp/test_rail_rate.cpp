// RailRate: what it learns from acknowledgements, with a clock of the test's own.
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

// A connection whose buffer is the limit: all of it is under way, three round trips after each other.
void a_buffer_that_bounds_is_known() {
  constexpr std::size_t all = 6'000'000;
  const auto now = Clock::now();
  const auto look = [&](BufferBound& bound, std::size_t unsent, std::chrono::microseconds round_trip) {
    bound.observe(now, unsent, all - unsent, round_trip, 80ms);
  };
  BufferBound bound;
  for (int looks = 0; looks < BufferBound::telling_looks; ++looks) {
    CHECK(!bound.is_known());
    look(bound, 0, 85ms);
  }
  CHECK(bound.is_known());
  BufferBound full;  // the path has a queue
  for (int looks = 0; looks < 10; ++looks) look(full, 0, 110ms);
  CHECK(!full.is_known());
  BufferBound paced;  // the congestion window or the pacing holds bytes back
  for (int looks = 0; looks < 10; ++looks) look(paced, all / 2, 81ms);
  CHECK(!paced.is_known());
  BufferBound now_and_then;
  for (int looks = 0; looks < 10; ++looks) look(now_and_then, 0, looks % 3 == 2 ? 110ms : 81ms);
  CHECK(!now_and_then.is_known());
  CHECK(!bound.is_due(now + 79ms, 80ms) && bound.is_due(now + 80ms, 80ms));
}

}  // namespace

int main() {
  a_buffer_that_bounds_is_known();
  learns_from_busy_windows();
  small_messages_tell_nothing();
  a_pause_at_the_beginning_tells_nothing();
  a_rail_that_carries_next_to_nothing_is_known_in_time();
  a_run_that_ended_early_only_raises();
  a_peer_that_does_not_read_is_disregarded();
  a_far_rail_is_measured_over_its_round_trip();
  return result("rail_rate");
}
