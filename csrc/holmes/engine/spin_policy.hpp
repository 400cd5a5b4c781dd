// SpinPolicy: how long a thread that waits polls before it sleeps.
#pragma once

#include <optional>

#include "holmes/core/work.hpp"

namespace holmes {

// A wake-up takes longer than many a wait, and polling takes processor time from other ranks: so it polls for a while,
// and less often where that was in vain lately. Waits for much are counted apart. One thread at a time.
class SpinPolicy {
public:
  // Polls for `spin` on the wall clock, then until it has used as much processor time.
  explicit SpinPolicy(Duration spin) : spin_(spin) {}

  // One wait.
  class Spin {
  public:
    explicit Spin(Duration spin) : spin_(spin) {}
    // Whether to poll once more.
    bool goes_on();
    bool has_begun() const { return start_.has_value(); }

  private:
    Duration spin_;
    std::optional<Clock::time_point> start_;
    std::optional<Duration> end_;  // in processor time
  };
  Spin begin() const { return Spin(spin_); }

  // Whether to poll before the `wait`th sleep for the same work.
  bool allows(unsigned wait) const;
  // What was waited for came while it polled.
  void succeeded() { misses_ = 0; }
  // It had to sleep, for so long.
  void slept(Duration duration) { misses_ = duration > spin_ ? misses_ + 1 : 0; }

  // The same of a wait for much.
  bool allows_bulk();
  // Such a wait took so long, at the end asleep or not. Returns whether it was long.
  bool waited_for_bulk(Duration duration, bool slept);

private:
  const Duration spin_;
  unsigned misses_ = 0;       // waits in a row that outlived the spin
  unsigned bulk_misses_ = 0;  // one more for each wait that did, one less for each that did not
  unsigned bulk_waits_ = 0;   // since most of them did
};

}  // namespace holmes
