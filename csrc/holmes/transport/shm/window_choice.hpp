// WindowChoice: whether what is sent goes through a ring or is shown in a DirectWindow, by what both cost.
#pragma once

#include <cstddef>
#include <optional>

#include "holmes/core/env.hpp"

namespace holmes {

// Below, the word to the receiver and back costs more than the copies (measured: 64 KiB take twice as long).
inline constexpr std::size_t min_window_bytes = 128 * 1024;

// The average cost of the last copies, seconds per byte; 0 while none was added.
class CopyCost {
public:
  void add(std::size_t bytes, double seconds);
  float s_per_byte() const { return static_cast<float>(average_); }

private:
  double average_ = 0;
};

// What the two ways cost, seconds per byte; 0: unknown.
struct WayCosts {
  double ring = 0;
  double window = 0;
};

// Long stretches of the stream go the better way, and short ones between them the other way, to learn what it costs by
// now. A short one is long enough for caches to hold what that way uses.
class WindowChoice {
public:
  WindowChoice(CmaUse use, std::size_t ring_bytes) : use_(use), trial_bytes_(8 * ring_bytes), left_(trial_bytes_) {}

  CmaUse use() const { return use_; }
  // Whether to show a piece of `bytes`; `set`: whether any are shown.
  bool shows(std::size_t bytes, std::optional<bool> set) const;
  // So many were sent. The costs count where a stretch ends.
  void sent(std::size_t bytes, const WayCosts& costs);
  // Trials aside.
  bool prefers_window() const { return use_ == CmaUse::always || is_better_; }
  // No more: the receiver cannot read this process's memory.
  void give_up();

private:
  CmaUse use_;
  std::size_t trial_bytes_;
  std::size_t left_;  // of this stretch
  bool is_trial_ = false;
  bool is_better_ = false;
};

}  // namespace holmes
