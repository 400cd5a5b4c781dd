// StallWatch and LinkHistory: when a connection stalls, and which samples of a link are kept; with a simulated clock.
#include "holmes/record/link_use.hpp"

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point start{1h};

void a_stall_counts_once_and_as_long_as_it_lasts() {
  StallWatch watch;
  auto now = start;
  const auto look = [&](bool is_under_way, std::uint64_t delivered) {
    now += 100ms;
    watch.look(now, is_under_way, delivered, 20ms);
  };
  look(true, 10);  // of what was before nothing is known
  for (int i = 0; i < 50; ++i) look(true, 11 + static_cast<std::uint64_t>(i));
  for (int i = 0; i < 50; ++i) look(false, 60);  // nothing to send
  for (int i = 0; i < 2; ++i) look(true, 60);
  CHECK(watch.stalls() == 0);
  CHECK(!watch.is_stalled());
  for (int i = 0; i < 18; ++i) look(true, 60);
  CHECK(watch.stalls() == 1);
  CHECK(watch.is_stalled());
  CHECK(watch.stalled_us() == 1'900'000);
  look(true, 61);
  CHECK(!watch.is_stalled());
  for (int i = 0; i < 3; ++i) look(true, 61);
  CHECK(watch.stalls() == 2);
  CHECK(watch.stalled_us() == 2'200'000);
}

void a_long_round_trip_is_no_stall() {
  StallWatch watch;
  auto now = start;
  watch.look(now, false, 5, 200ms);
  for (int i = 0; i < 6; ++i) watch.look(now += 100ms, true, 5, 200ms);
  CHECK(watch.stalls() == 0);
  watch.look(now += 100ms, true, 5, 200ms);
  CHECK(watch.stalls() == 1);
}

void what_began_between_two_looks_is_no_stall() {
  StallWatch watch;
  watch.look(start, false, 5, 20ms);
  watch.look(start + 2s, true, 5, 20ms);  // the looker was held up
  CHECK(watch.stalls() == 0);
  watch.look(start + 3s, true, 5, 20ms);
  CHECK(watch.stalls() == 1);
  CHECK(watch.stalled_us() == 1'000'000);
}

void a_history_has_all_bytes_in_little_memory() {
  LinkHistory history;
  const auto at = [](std::uint64_t number) { return start + number * 100ms; };
  for (std::uint64_t i = 0; i < 100'000; ++i) history.add({.at = at(i), .sent_bytes = i * 1000});
  const auto& samples = history.samples();
  CHECK(samples.size() <= LinkHistory::most);
  CHECK(samples.size() > LinkHistory::most / 2);
  CHECK(samples.front().at == start);
  for (std::size_t i = 1; i < samples.size(); ++i) {
    CHECK(samples[i - 1].at < samples[i].at);
    CHECK(samples[i].sent_bytes == static_cast<std::uint64_t>((samples[i].at - start) / 100ms) * 1000);
  }
  for (std::size_t i = samples.size() - LinkHistory::most / 4; i < samples.size(); ++i)
    CHECK(samples[i].at - samples[i - 1].at == 100ms);
}

void a_link_that_rests_takes_no_samples() {
  LinkHistory history;
  for (int i = 0; i < 1000; ++i) history.add({.at = start + i * 100ms, .sent_bytes = 7});
  history.add({.at = start + 100s, .sent_bytes = 8});
  const auto& samples = history.samples();
  CHECK(samples.size() == 3);
  CHECK(samples[0].at == start);
  CHECK(samples[1].at == start + 99900ms);
}

}  // namespace

int main() {
  a_stall_counts_once_and_as_long_as_it_lasts();
  a_long_round_trip_is_no_stall();
  what_began_between_two_looks_is_no_stall();
  a_history_has_all_bytes_in_little_memory();
  a_link_that_rests_takes_no_samples();
  return result("link_use");
}
