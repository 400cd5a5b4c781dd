// PathRate, PathShare and Path: when they know what a path carries, and which changes they tell; over a simulated link
// with a simulated clock.
#include "holmes/transport/path_watch.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>

#include "check.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point start{1h};

// --- rates ---

struct Rates {
  PathRate rate;
  Clock::time_point now = start;
  int changes = 0;
  double before = 0;

  // So many measurements of 50 ms, which waver by a tenth.
  void run(int count, double megabytes_per_s) {
    for (int i = 0; i < count; ++i) {
      now += 50ms;
      const auto changed = rate.observe(now, megabytes_per_s * (1 + 0.1 * (i % 3 - 1)) * 50e3, 50ms, 20ms);
      if (!changed) continue;
      ++changes;
      before = *changed;
    }
  }
  bool carries(double megabytes_per_s) const {
    const auto found = rate.bytes_per_s();
    return found && std::abs(*found / (megabytes_per_s * 1e6) - 1) < 0.03;
  }
};

void tells_each_change_once() {
  Rates path;
  path.run(38, 20);
  CHECK(!path.rate.bytes_per_s());
  path.run(10, 20);
  CHECK(path.carries(20));
  CHECK(path.changes == 0);
  path.run(60, 10);
  CHECK(path.carries(10));
  CHECK(path.changes == 1);
  CHECK(std::lround(path.before / 1e6) == 20);
  path.run(1000, 10);
  CHECK(path.changes == 1);
  path.run(60, 20);
  CHECK(path.carries(20));
  CHECK(path.changes == 2);
}

void tells_no_start_and_no_burst() {
  Rates path;
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
  Rates path;
  for (double rate = 20; rate > 9; rate *= 0.97) path.run(9, rate);
  CHECK(path.changes == 1);
}

// --- a link ---

constexpr double full_bytes_per_s = 25e6;

// A connection with a window, as a fluid: what is written waits in the socket until the window lets it go, then in the
// link's queue.
struct Stream {
  double share = 1;  // of the windows, in proportion
  double unsent = 0, queued = 0, sent = 0, acknowledged = 0;
  std::deque<double> on_the_way;  // acknowledgements, by millisecond
  std::unique_ptr<PathWatch> watch{};
};

// Two hosts behind one uplink, each with `streams` connections over it and a Path of its own. One millisecond after
// the other.
class Uplinked {
public:
  Uplinked(int hosts, int streams, int round_trip_ms) : round_trip_ms_(round_trip_ms), hosts_(hosts) {
    for (int host = 0; host < hosts; ++host) {
      const std::string nic = "sim" + std::to_string(made_++);
      uplinks_.push_back(Uplink::of(nic));
      others_.push_back(std::make_shared<Others>(*this, host));
      if (hosts > 1) uplinks_.back()->join(others_.back(), std::nullopt, 0);
      const auto path = Path::of(nic, "cluster b");
      for (int i = 0; i < streams; ++i) {
        streams_.push_back(std::make_unique<Stream>());
        Stream& stream = *streams_.back();
        stream.on_the_way.assign(static_cast<std::size_t>(round_trip_ms), 0);
        stream.watch = std::make_unique<PathWatch>(path, host, [this, &stream] { return sample(stream); });
      }
    }
  }

  double rate = full_bytes_per_s;
  std::vector<std::unique_ptr<Stream>>& streams() { return streams_; }
  Clock::time_point now() const { return now_; }
  double seconds() const { return std::chrono::duration<double>(now_ - start).count(); }

  // All streams have enough to send for so long, and then nothing.
  void send_for(std::chrono::milliseconds busy, std::chrono::milliseconds idle = 0ms) {
    for (auto at = 0ms; at < busy; at += 1ms) {
      for (const auto& stream : streams_) stream->unsent = std::max(stream->unsent, 1e6);
      step();
    }
    for (const auto& stream : streams_) stream->unsent = 0;
    for (auto at = 0ms; at < idle; at += 1ms) step();
  }
  // Until `until`, in this rhythm.
  void run(std::chrono::milliseconds until, std::chrono::milliseconds busy, std::chrono::milliseconds idle) {
    while (now_ - start < until) send_for(busy, idle);
  }

  std::uint64_t changes() const {
    std::uint64_t most = 0;
    for (const auto& stream : streams_) most = std::max(most, stream->watch->changes());
    return most;
  }
  double carries() const {
    std::uint64_t most = 0;
    for (const auto& stream : streams_) most = std::max(most, stream->watch->bytes_per_s());
    return static_cast<double>(most) / full_bytes_per_s;
  }

private:
  struct Others final : UplinkNeighbours {
    Others(Uplinked& all, int host) : all_(all), host_(host) {}
    void tell(const Turn&) noexcept override {}
    void tell(const Carried& carried) noexcept override {
      for (int other = 0; other < all_.hosts_; ++other)
        if (other != host_) all_.uplinks_[static_cast<std::size_t>(other)]->heard(carried, all_.now_);
    }
    void hear() noexcept override {}
    Uplinked& all_;
    int host_;
  };

  PathSample sample(const Stream& stream) const {
    const auto round_trip = std::chrono::milliseconds(round_trip_ms_);
    return {.sent_bytes = static_cast<std::uint64_t>(stream.sent),
            .acknowledged_bytes = static_cast<std::uint64_t>(stream.acknowledged),
            .arrived_bytes = static_cast<std::uint64_t>(stream.acknowledged),
            .awaited_us = 0,
            .round_trip = round_trip,
            .shortest = round_trip,
            .has_unsent = stream.unsent > 0};
  }

  void step() {
    double queued = 0, shares = 0;
    for (const auto& stream : streams_) shares += stream->share;
    const double windows = 2 * full_bytes_per_s * 1e-3 * std::max(round_trip_ms_, 10);
    for (const auto& stream : streams_) {
      const double window = windows * stream->share / shares;
      const double sent = std::clamp(window - (stream->sent - stream->acknowledged), 0.0, stream->unsent);
      stream->unsent -= sent;
      stream->sent += sent;
      stream->queued += sent;
      queued += stream->queued;
    }
    const double passed = std::min(queued, rate * 1e-3);
    for (const auto& stream : streams_) {
      const double own = queued > 0 ? passed * stream->queued / queued : 0;
      stream->queued -= own;
      stream->on_the_way.push_back(own);
      stream->acknowledged += stream->on_the_way.front();
      stream->on_the_way.pop_front();
    }
    now_ += 1ms;
    for (const auto& stream : streams_)  // as long as there is something to look for
      if (stream->sent - stream->acknowledged > 1) stream->watch->look(now_);
  }

  static inline int made_ = 0;
  const int round_trip_ms_;
  const int hosts_;
  Clock::time_point now_ = start;
  std::vector<std::shared_ptr<Uplink>> uplinks_;
  std::vector<std::shared_ptr<Others>> others_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

// What `action` has the engine log, in lines that tell of a change.
template <typename Action>
std::vector<std::string> told_by(const Action& action) {
  std::fflush(stderr);
  std::FILE* const file = std::tmpfile();
  const int kept = ::dup(STDERR_FILENO);
  ::dup2(::fileno(file), STDERR_FILENO);
  action();
  std::fflush(stderr);
  ::dup2(kept, STDERR_FILENO);
  ::close(kept);
  std::rewind(file);
  std::vector<std::string> told;
  for (char line[512]; std::fgets(line, sizeof line, file);)
    if (std::string(line).find(" carries ") != std::string::npos) told.emplace_back(line);
  std::fclose(file);
  return told;
}

struct Rhythm {
  std::chrono::milliseconds busy, idle;
};
constexpr Rhythm steady{100ms, 0ms}, steps{300ms, 1000ms}, pieces{130ms, 40ms};

// Halves after 8 s and is back after 16 s: told once each, within 5 s.
void follows(int hosts, int streams, int round_trip_ms, Rhythm rhythm) {
  Uplinked link(hosts, streams, round_trip_ms);
  std::vector<std::size_t> told;
  const auto until = [&](std::chrono::milliseconds at) {
    told.push_back(told_by([&] { link.run(at, rhythm.busy, rhythm.idle); }).size());
  };
  until(8s);
  const double full = link.carries();
  link.rate /= 2;
  until(13s);
  const double half = link.carries();
  until(16s);
  link.rate *= 2;
  until(21s);
  const double again = link.carries();
  until(40s);
  const bool is_right = told == std::vector<std::size_t>({0, 1, 0, 1, 0}) && std::abs(full - 1) < 0.1 &&
                        std::abs(half - 0.5) < 0.07 && std::abs(again - 1) < 0.1 && link.changes() == 2;
  if (!is_right) {
    std::fprintf(stderr, "%d hosts, %d streams, %d ms, %ld of %ld ms: carries %.2f %.2f %.2f, %ld changes, told", hosts,
                 streams, round_trip_ms, rhythm.busy.count(), (rhythm.busy + rhythm.idle).count(), full, half, again,
                 static_cast<long>(link.changes()));
    for (const std::size_t count : told) std::fprintf(stderr, " %zu", count);
    std::fprintf(stderr, "\n");
  }
  CHECK(is_right);
}

void a_change_is_told_once_and_soon() {
  for (const int hosts : {1, 2})
    for (const int streams : {1, 4})
      for (const int round_trip_ms : {20, 80, 200})
        for (const Rhythm rhythm : {steady, steps, pieces}) follows(hosts, streams, round_trip_ms, rhythm);
}

void what_is_no_change_is_not_told() {
  for (const int streams : {1, 4}) {
    Uplinked link(1, streams, 80);
    const auto told = told_by([&] {
      link.send_for(5s);
      for (int i = 0; i < 4; ++i) {  // what a retransmission, or a processor that is busy, takes
        link.rate = 0;
        link.send_for(200ms);
        link.rate = full_bytes_per_s;
        link.send_for(1s + i * 37ms);
      }
      for (int i = 0; i < 6; ++i) {  // interruptions
        link.rate = 0;
        link.send_for(900ms);
        link.rate = full_bytes_per_s;
        link.send_for(700ms);
      }
      link.rate = 0;
      link.send_for(3s);
      link.rate = full_bytes_per_s;
      link.send_for(3s);
      link.send_for(0ms, 30s);
      link.run(50s, 300ms, 1000ms);
      for (int i = 0; i < 50; ++i) link.send_for(20ms, 200ms);  // bursts that no look sees
      link.send_for(3s);
    });
    CHECK(told.empty() && link.changes() == 0);
    CHECK(std::abs(link.carries() - 1) < 0.05);
  }
}

void what_changes_slowly_is_told_when_it_has() {
  Uplinked link(1, 2, 80);
  const auto told = told_by([&] {
    link.send_for(5s);
    for (; link.rate > 0.55 * full_bytes_per_s; link.rate *= 0.99) link.send_for(200ms);
    link.send_for(5s);
  });
  CHECK(told.size() == 1);
  CHECK(contains(told.at(0), "the path to cluster b over NIC sim"));
}

void a_link_that_is_another_after_a_pause_is_told() {
  Uplinked link(1, 2, 80);
  const auto told = told_by([&] {
    link.send_for(5s, 10s);
    link.rate /= 2;
    link.send_for(4s);
  });
  CHECK(told.size() == 1);
  CHECK(contains(told.at(0), "Mbit/s, before 200; round trip 80 ms"));
  CHECK(std::abs(link.carries() - 0.5) < 0.05);
}

// As congestion control does for seconds. Each stream's own rate more than doubles and is halved again.
void shares_that_change_are_no_change_of_the_path() {
  for (const int hosts : {1, 2}) {
    Uplinked link(hosts, 2 / hosts, 80);
    const auto told = told_by([&] {
      for (int i = 0; i < 10; ++i) {
        link.streams()[0]->share = i % 2 ? 1 : 3;
        link.streams()[1]->share = i % 2 ? 3 : 1;
        link.send_for(2s);
      }
    });
    CHECK(told.empty());
    CHECK(link.changes() == 0 && std::abs(link.carries() - 1) < 0.1);
  }
}

}  // namespace

int main() {
  ::setenv("HOLMES_LOG", "info", 1);
  tells_each_change_once();
  tells_no_start_and_no_burst();
  adds_up_what_comes_slowly();
  a_change_is_told_once_and_soon();
  what_is_no_change_is_not_told();
  what_changes_slowly_is_told_when_it_has();
  a_link_that_is_another_after_a_pause_is_told();
  shares_that_change_are_no_change_of_the_path();
  return result("path_watch");
}
