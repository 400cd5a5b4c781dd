// PathWatch: how much a far connection's path carries, and since when that is another rate.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "holmes/core/clock.hpp"

namespace holmes {

// The rate of a path, of what was measured while more was to be sent than it took: the rest tells about the sender.
class PathRate {
public:
  static constexpr double change = 1.5;

  // Bytes per second; absent: not known, since too little was sent or the rate has not settled.
  std::optional<double> bytes_per_s() const { return rate_; }
  // Returns the rate before, where this tells that it was another one by more than a third and is settled again: once
  // for each change.
  std::optional<double> observe(double bytes_per_s);

private:
  std::optional<double> rate_;
  std::optional<double> told_;
  // The latest ones. A rate that all but the outermost agree on is settled: neither TCP's start nor a burst is a
  // change.
  std::array<double, 9> measured_{};
  std::size_t count_ = 0;
};

// Asks the system now and then, and tells changes in the log. One thread at a time, getters excepted.
class PathWatch {
public:
  // `fd`: a TCP socket that lives as long; `connection`: names it in messages.
  PathWatch(int fd, int own_rank, std::string connection)
      : fd_(fd), own_rank_(own_rank), connection_(std::move(connection)) {}

  // Looks, where it is time to.
  void look(Clock::time_point now);
  // From now on others share the path, or no longer: another rate is no change of it.
  void forget() { rate_ = {}; }
  // 0: not known.
  std::uint64_t bytes_per_s() const { return bytes_per_s_.load(std::memory_order_relaxed); }
  std::uint64_t changes() const { return changes_.load(std::memory_order_relaxed); }

private:
  void tell(double before, double now_bytes_per_s, double round_trip_s) const;

  const int fd_;
  const int own_rank_;
  const std::string connection_;
  PathRate rate_;
  Clock::time_point looked_at_{};
  std::uint64_t acknowledged_bytes_ = 0;
  std::uint64_t receiver_limited_us_ = 0;
  bool had_unsent_ = false;
  std::atomic<std::uint64_t> bytes_per_s_{0};
  std::atomic<std::uint64_t> changes_{0};
};

}  // namespace holmes
