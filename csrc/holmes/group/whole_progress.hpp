// WholeProgress: how far a rank of a wide group is in the group's operations. Its rows and columns know of their own
// steps alone; this they share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "holmes/core/clock.hpp"

namespace holmes {

// A deadline has passed in an operation of the whole: whom does the rank that is asked wait for in it, or before it?
struct WholeQuestion {
  std::uint64_t operation = 0;
  int late = 0;                        // whose deadline it is, as messages call that rank
  std::chrono::milliseconds lease{0};  // for so long it is to be passed on; whose deadline it is asks again before
};

// What a rank says of itself.
struct WholeState {
  std::uint64_t entered = 0;  // operations of the whole that were called
  std::uint64_t ended = 0;    // of these
  bool waits = false;         // for somebody, in one of its rows and columns

  // It has called nothing after the first `operation`, and waits for nobody.
  bool is_missing_in(std::uint64_t operation) const { return entered <= operation && ended == entered; }
  // It is in the operation or one before it, and waits for somebody itself, or is past it.
  bool only_waits_in(std::uint64_t operation) const { return waits || ended > operation; }
};

// A row or a column of this rank.
class WholePart {
public:
  virtual ~WholePart() = default;
  // Whoever sleeps beside an operation looks at its deadline.
  virtual void wake() const = 0;
  // Reads what peers ask where nobody does so anyway. The caller holds no lock but that of another part.
  virtual void hear() noexcept = 0;
};

// Thread-safe.
class WholeProgress {
public:
  static constexpr std::chrono::milliseconds longest_lease{2000};

  // Of an operation, which gets this number.
  std::uint64_t enter();
  void end();
  // What was entered last was not called after all.
  void withdraw();
  void begin_step() { steps_.fetch_add(1, std::memory_order_relaxed); }
  void end_step() { steps_.fetch_sub(1, std::memory_order_relaxed); }
  WholeState state() const;

  // Another rank asks this one: all parts look.
  void ask(const WholeQuestion& question, Clock::time_point now);
  // What is asked just now of who waits in `operation`, with what is left of the lease.
  std::optional<WholeQuestion> asked_in(std::uint64_t operation, Clock::time_point now) const;

  void join(const std::weak_ptr<WholePart>& part);
  // All parts do.
  void hear() const;

private:
  std::vector<std::shared_ptr<WholePart>> parts() const;

  mutable std::mutex mutex_;
  std::uint64_t entered_ = 0;
  std::uint64_t ended_ = 0;
  WholeQuestion asked_{};
  Clock::time_point asked_until_{};
  std::vector<std::weak_ptr<WholePart>> parts_;
  std::atomic<int> steps_{0};  // under way
};

}  // namespace holmes
