// LinkUse: what a connection sends over the link between clusters, by time, and when nothing of it arrives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/clock.hpp"

namespace holmes {

// Of one connection: it stalls while bytes are under way and none arrive, for longer than a round trip explains. One
// thread at a time, getters excepted.
class StallWatch {
public:
  static constexpr std::chrono::milliseconds least{300};
  static constexpr int least_round_trips = 3;

  void look(Clock::time_point now, bool is_under_way, std::uint64_t delivered, Duration round_trip);
  bool is_stalled() const { return is_stalled_; }
  std::uint64_t stalls() const { return stalls_.load(std::memory_order_relaxed); }
  std::uint64_t stalled_us() const { return static_cast<std::uint64_t>(stalled_ns_.load() / 1000); }

private:
  std::uint64_t delivered_ = 0;
  Clock::time_point moved_at_{};
  Clock::time_point looked_at_{};
  bool was_under_way_ = false;
  bool is_stalled_ = false;
  std::atomic<std::uint64_t> stalls_{0};
  std::atomic<std::int64_t> stalled_ns_{0};
};

// A link at one moment, as one process uses it.
struct LinkSample {
  Clock::time_point at{};
  std::uint64_t sent_bytes = 0;            // until then, by the system; what was sent again too
  std::chrono::microseconds round_trip{};  // the longest of connections with something under way; 0: there are none
  std::uint32_t stalled = 0;               // connections
};

// The latest samples as they came, older ones further and further apart. Takes all its memory when it is made.
class LinkHistory {
public:
  static constexpr std::size_t most = 512;

  LinkHistory() { samples_.reserve(most); }
  void add(const LinkSample& sample);
  const std::vector<LinkSample>& samples() const { return samples_; }

private:
  std::vector<LinkSample> samples_;
};

// What a process knows of a link. `from` and `to`: clusters, or hosts where no clusters are named.
struct LinkRecord {
  std::string interface;
  std::string from;
  std::string to;
  std::vector<LinkSample> samples;
};

// What the system knows of a connection, counted from its beginning.
struct UseSample {
  std::uint64_t sent_bytes = 0;  // what was sent again too
  std::uint64_t delivered = 0;   // counts what has arrived
  std::chrono::microseconds round_trip{};
  bool is_under_way = false;  // something is sent and not acknowledged
};

struct Link;

// One TCP connection, for as long as its socket is open. Looked at by `look_at_links`.
class LinkUse {
public:
  using Ask = std::function<std::optional<UseSample>()>;

  // `ask`: what the system knows, from any thread.
  LinkUse(std::shared_ptr<Link> link, Ask ask);
  ~LinkUse();
  LinkUse(const LinkUse&) = delete;
  LinkUse& operator=(const LinkUse&) = delete;

  const StallWatch& stalls() const { return stalls_; }
  void look(Clock::time_point now);  // under the lock of look_at_links

private:
  const std::shared_ptr<Link> link_;
  const Ask ask_;
  std::uint64_t sent_bytes_ = 0;
  StallWatch stalls_;
};

// The one of this process; a forked child has none of its parent's. Thread-safe, as all here.
std::shared_ptr<Link> link_between(const std::string& interface, const std::string& from, const std::string& to);

// Looks at all connections of the process. Returns when to look again: so late that it costs next to nothing; never
// (`Clock::time_point::max()`) while there are no connections.
Clock::time_point look_at_links();
std::vector<LinkRecord> link_records();

}  // namespace holmes
