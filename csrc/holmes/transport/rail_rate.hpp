// RailRate: how fast a rail delivers, from what the peer acknowledged while the rail was busy.
#pragma once

#include <cstdint>
#include <optional>

#include "holmes/core/work.hpp"

namespace holmes {

// The kernel's own estimate (TCP_INFO) wavers with bursts of acknowledgements; this one averages over windows of
// `window` or more. A window counts in full only where the rail had bytes under way all the time; one that ended early
// tells the least that the rail can do.
class RailRate {
public:
  static constexpr auto window = std::chrono::milliseconds(10);
  static constexpr auto first_window = std::chrono::milliseconds(3);

  // Bytes per second; absent: not known yet.
  std::optional<double> bytes_per_s() const { return rate_; }

  // Bytes were given to a rail that had none under way.
  void start(Clock::time_point now, std::uint64_t acknowledged_bytes) {
    start_ = now;
    start_bytes_ = acknowledged_bytes;
    from_idle_ = true;
  }
  // Whether `observe` would end a window.
  bool is_due(Clock::time_point now) const { return start_ && now - *start_ >= (rate_ ? window : first_window); }
  // `acknowledged_bytes`: so far. `is_busy`: more than the end of a message is still under way.
  void observe(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy);
  // The peer did not read: what happened in this window says nothing about the rail.
  void disregard(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy);

private:
  std::optional<double> rate_;
  std::optional<Clock::time_point> start_;
  std::uint64_t start_bytes_ = 0;
  bool from_idle_ = false;
};

}  // namespace holmes
