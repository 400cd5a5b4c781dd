// PathWatch: how much the path of far connections carries, and since when that is another rate.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/clock.hpp"
#include "holmes/transport/uplink.hpp"

namespace holmes {

// The rate of a path, of what arrived while more was to be sent than it took: the rest tells about the sender.
class PathRate {
public:
  static constexpr double change = 1.5;
  // A window is so long, and has so much of such time: two after each other tell a change. In less of it the rate
  // wavers: shares of an uplink change, and senders probe for more, or for the round trip.
  static constexpr std::chrono::milliseconds window{1000};
  static constexpr std::chrono::milliseconds least_time{200};
  static constexpr double least_round_trips = 2;
  // Nothing arrives: the path does not carry less, it is interrupted.
  static constexpr std::chrono::milliseconds interruption{300};

  // Bytes per second, of the latest window; absent: not known, since too little was sent or it has not settled yet.
  std::optional<double> bytes_per_s() const { return rate_; }
  // `bytes` arrived in the time `elapsed` before `now`, in which the path was the limit. Returns the rate before, where
  // this tells that it was another one by more than a third: once for each change.
  std::optional<double> observe(Clock::time_point now, double bytes, Duration elapsed, Duration round_trip);
  // The next rate is no change of this one.
  void forget() { *this = {}; }

private:
  struct Sum {
    Clock::time_point begun{};
    double bytes = 0;
    double seconds = 0;
    double rate() const { return bytes / seconds; }
  };
  std::optional<double> judge(const Sum& latest);

  std::optional<double> rate_;
  std::optional<double> told_;
  Sum window_;  // that is being measured
  std::optional<Sum> previous_;
  double silent_s_ = 0;  // until now
};

// What the system knows of a connection, counted from its beginning.
struct PathSample {
  std::uint64_t sent_bytes = 0;          // of its stream, each once
  std::uint64_t acknowledged_bytes = 0;  // of these, in order
  std::uint64_t arrived_bytes = 0;       // behind a lost packet too
  std::uint64_t awaited_us = 0;          // the peer did not read
  std::chrono::microseconds round_trip{}, shortest{};
  bool has_unsent = false;  // and does not hold it back by itself
};

// Which bytes of a connection waited for its path: those that were sent while others were left unsent. How fast they
// are acknowledged, a round trip later, is what the path carries; also where that is over before the first of them is.
class PathShare {
public:
  struct Arrived {
    double bytes = 0;
    bool is_limit = false;  // in all of the time
  };
  // Since the last look; of the first one, and after a pause, nothing is known.
  Arrived observe(Clock::time_point now, const PathSample& sample);

  static constexpr std::chrono::milliseconds longest_interval{100};

private:
  // Positions in the stream.
  struct Range {
    std::uint64_t from = 0;
    std::uint64_t to = 0;
  };
  bool is_within_range(std::uint64_t from, std::uint64_t to) const;

  PathSample last_;
  Clock::time_point looked_at_{};
  std::array<Range, 8> limited_{};  // of which bytes may be under way, the newest at `newest_`
  std::size_t newest_ = 0;
  int looks_without_ = 0;  // unsent bytes, since the last one with some
};

class PathWatch;

// The connections of this process that leave by one NIC for one cluster, or one host where no clusters are named: they
// share a path, and what one of them carries depends on the others. So they are judged together, and with what the
// processes beside this one carry there, as far as these tell (Uplink). Thread-safe.
class Path {
public:
  static constexpr std::chrono::milliseconds look_interval{20};

  static std::shared_ptr<Path> of(const std::string& interface, const std::string& place);
  Path(const std::string& interface, const std::string& place);

  void add(PathWatch& watch);
  void remove(PathWatch& watch);
  // Looks, where it is time to, at all of them that were used lately; tells changes in the log.
  void look(Clock::time_point now, const PathWatch& asked_by);
  void forget();
  std::uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }

private:
  struct Change {
    double before = 0;
    double now_bytes_per_s = 0;
    std::chrono::microseconds round_trip{};
    int processes = 1;
    Clock::time_point tell_at{};
  };
  struct Look {
    std::optional<Carried> carried{};
    std::optional<Change> change{};
  };

  void heed_others(Clock::time_point now, const Beside& beside);
  Look look_at_all(Clock::time_point now, const Beside& beside);
  std::optional<Carried> what_is_carried(Clock::time_point now, double bytes, bool is_limit);
  void tell(const Change& change, const PathWatch& asked_by) const;

  const std::string name_;
  const std::uint64_t key_;
  const std::uint64_t teller_;
  const std::shared_ptr<Uplink> uplink_;
  std::atomic<Clock::rep> next_look_{0};
  std::atomic<std::uint64_t> changes_{0};

  std::mutex mutex_;  // protects what follows, and the shares of the watches
  std::vector<PathWatch*> watches_;
  Clock::time_point looked_at_{};
  PathRate rate_;
  std::optional<Change> untold_;
  Clock::time_point told_at_{};
  Clock::time_point others_told_at_{};
  double carried_bytes_ = 0;  // since they were told
  bool carried_at_limit_ = false;
  Clock::time_point carried_since_{};
};

// One connection of a path. One thread at a time, getters excepted.
class PathWatch {
public:
  using Ask = std::function<std::optional<PathSample>()>;

  // `ask`: what the system knows, from any thread.
  PathWatch(std::shared_ptr<Path> path, int own_rank, Ask ask);
  // `fd`: a TCP socket that lives as long.
  PathWatch(std::shared_ptr<Path> path, int own_rank, int fd);
  ~PathWatch() { path_->remove(*this); }
  PathWatch(const PathWatch&) = delete;
  PathWatch& operator=(const PathWatch&) = delete;

  void look(Clock::time_point now) {
    used_at_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    path_->look(now, *this);
  }
  // From now on others share the path, or no longer: another rate is no change of it.
  void forget() { path_->forget(); }
  // Of the path, once this connection waited for it; 0: not known.
  std::uint64_t bytes_per_s() const { return bytes_per_s_.load(std::memory_order_relaxed); }
  // Of that, as far as this connection has seen them.
  std::uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }

private:
  friend class Path;

  const std::shared_ptr<Path> path_;
  const int own_rank_;
  const Ask ask_;
  const std::uint64_t changes_before_;
  std::atomic<Clock::rep> used_at_{0};
  PathShare share_;        // path_ protects both
  bool is_limit_ = false;  // of the path, at its latest look
  std::atomic<std::uint64_t> bytes_per_s_{0};
  std::atomic<std::uint64_t> changes_{0};
};

}  // namespace holmes
