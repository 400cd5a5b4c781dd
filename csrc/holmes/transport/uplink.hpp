// Uplink: who has something to send over a NIC of this process, and over the same uplink from hosts beside this one.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "holmes/core/clock.hpp"
#include "holmes/core/options.hpp"

namespace holmes {

class PathPacer;

// Who goes first where groups share links: higher priorities, and of one priority the earlier of those that have a
// turn. Those without one share.
struct Precedence {
  int priority = 0;
  std::optional<int> turn{};
  bool goes_before(const Precedence& other) const {
    return priority != other.priority ? priority > other.priority : turn && other.turn && *turn < *other.turn;
  }
  bool operator==(const Precedence&) const = default;
};

// Something of a group with this precedence is to be sent out of the cluster, over NIC number `rail` of the group that
// tells it. It holds for `lease` from when it is heard; 0: no longer. Whoever is lost, or tells nothing, so holds up
// nobody beyond it.
struct Turn {
  Precedence of;
  int rail = 0;
  std::chrono::milliseconds lease{0};
  bool operator==(const Turn&) const = default;
};

// What a process carries over a path just now, see Path. `path` and `teller` tell paths and processes apart.
struct Carried {
  std::uint64_t path = 0;
  std::uint64_t teller = 0;
  double bytes_per_s = 0;
  bool is_limit = false;  // of what the process sends
  bool has_told = false;  // of a change, just now
  int rail = 0;           // as of a Turn
  bool operator==(const Carried&) const = default;
};

// What others of the cluster carry over a path.
struct Beside {
  double bytes_per_s = 0;
  int processes = 0;
  bool one_may_tell = false;  // of a change: one that comes before who asks
  bool one_has_told = false;
};

// The processes of the own cluster, as one group knows them. Thread-safe; no call blocks.
class UplinkNeighbours {
public:
  virtual ~UplinkNeighbours() = default;
  virtual void tell(const Turn& turn) noexcept = 0;
  virtual void tell(const Carried& carried) noexcept = 0;
  // Passes on to Uplink::heard what they have told, where nobody does so anyway.
  virtual void hear() noexcept = 0;
};

// Hosts notice each other's packets only by the queue that they make; so who has more to send out of the cluster than
// the path takes at once says so to those beside it, and again for as long as that is so. Thread-safe; one for each
// NIC of a process. Knows no clock.
class Uplink {
public:
  static constexpr std::chrono::milliseconds lease{60};
  static constexpr std::chrono::milliseconds renewal{20};
  // How long what a process carries holds; it tells more often.
  static constexpr std::chrono::milliseconds carried_lease{150};
  // How long a process that pauses may yet be the one that tells of a change, or has told.
  static constexpr std::chrono::seconds carried_memory{5};

  // The one of the NIC, while it is used.
  static std::shared_ptr<Uplink> of(const std::string& interface);

  // `neighbours`, of a group of this priority (absent: none), are told the turns of groups of a higher one and of those
  // of theirs that have a turn, without a priority of all that have one; and what is carried. Of these the NIC is
  // number `rail`.
  void join(std::weak_ptr<UplinkNeighbours> neighbours, std::optional<int> priority, int rail);
  // Whether any are told the turns of such a group.
  bool has_neighbours(const Precedence& of) const;

  // --- of this process ---
  // Streams of one precedence that have something to send; their turn begins with the first one and ends with the last.
  void begin_turn(const Precedence& of, Clock::time_point now);
  void keep_turn(const Precedence& of, Clock::time_point now);
  void end_turn(const Precedence& of);

  // --- of others ---
  // Looks whether neighbours have told anything, where that was not done just now.
  void hear(Clock::time_point now);
  // `source`: tells apart who told it. Leases are no longer than `lease`.
  void heard(const void* source, const Turn& turn, Clock::time_point now);
  bool gives_way(const Precedence& own, Clock::time_point now) const;

  // --- what is carried ---
  void tell(const Carried& carried) const;
  void heard(const Carried& carried, Clock::time_point now);
  // `teller`: who asks. Those whose number is lower come first.
  Beside beside(std::uint64_t path, std::uint64_t teller, Clock::time_point now) const;

  // --- streams of this process ---
  void add(const PathPacer& pacer);
  void remove(const PathPacer& pacer);
  template <typename Wanted>
  bool has_any(const Wanted& is_wanted) const {
    const std::lock_guard lock(mutex_);
    for (const PathPacer* pacer : pacers_)
      if (is_wanted(*pacer)) return true;
    return false;
  }

private:
  struct Member {
    std::weak_ptr<UplinkNeighbours> neighbours;
    std::optional<int> priority;
    int rail = 0;

    bool is_told(const Precedence& of) const {
      return priority ? of.goes_before({*priority, last_turn + 1}) : of.turn.has_value();
    }
  };
  struct Lease {
    const void* source;
    Precedence of;
    Clock::time_point until;
  };
  struct Told {
    int streams = 0;
    Clock::time_point at{};
  };
  using Members = std::vector<std::pair<std::shared_ptr<UplinkNeighbours>, Member>>;

  Members members() const;
  Told& told(const Precedence& of) { return told_[of.priority][of.turn.value_or(last_turn + 1)]; }
  void tell(const Precedence& of, std::chrono::milliseconds for_so_long) const;

  mutable std::mutex mutex_;
  std::vector<const PathPacer*> pacers_;
  std::vector<Member> members_;
  std::vector<Lease> leases_;
  std::vector<std::pair<Carried, Clock::time_point>> carried_;  // when that was told
  Told told_[highest_priority + 1][last_turn + 2];              // see told()
  Clock::time_point heard_at_{};
};

}  // namespace holmes
