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
    // `rushes`: polls that leave nobody else the processor, at the beginning.
    Spin(Duration spin, unsigned rushes) : spin_(spin), rushes_(spin == Duration::zero() ? 0 : rushes) {}
    // Whether to poll once more; leaves other threads the processor before that.
    bool goes_on();
    bool has_begun() const { return rushed_ > 0 || start_.has_value(); }
    // Whether it polled in a rush, and that was not enough.
    bool outlived_rush() const { return rushes_ > 0 && start_.has_value(); }
    bool rushes() const { return rushes_ > 0; }
    // Whether the next poll leaves nobody else the processor.
    bool is_rushing() const { return rushed_ < rushes_; }

  private:
    Duration spin_;
    unsigned rushes_;
    unsigned rushed_ = 0;
    std::optional<Clock::time_point> start_;
    std::optional<Duration> end_;  // in processor time
  };
  // `may_rush`: what is waited for is asked for without a system call.
  Spin begin(bool may_rush);

  // Whether to poll before the `wait`th sleep for the same work.
  bool allows(unsigned wait) const;
  // What was waited for came while it polled.
  void succeeded(const Spin& spin);
  // It had to sleep, for so long.
  void slept(Duration duration) { misses_ = duration > spin_ ? misses_ + 1 : 0; }

  // The same of a wait for much.
  bool allows_bulk();
  // Such a wait took so long, at the end asleep or not. Returns whether it was long.
  bool waited_for_bulk(Duration duration, bool slept);

private:
  const Duration spin_;
  unsigned misses_ = 0;       // waits in a row that outlived the spin
  unsigned rush_misses_ = 0;  // one more for each wait that outlived its rush, one less for each that did not
  unsigned no_rushes_ = 0;    // since most of them did
  unsigned bulk_misses_ = 0;  // one more for each wait that did, one less for each that did not
  unsigned bulk_waits_ = 0;   // since most of them did
};

}  // namespace holmes
