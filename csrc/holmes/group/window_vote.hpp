// WindowVote: whether a collective goes through windows (see DirectWindow) or rings. What it took both ways is
// measured, by operation and size; all ranks tell each other and decide alike.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "holmes/core/env.hpp"
#include "holmes/transport/shm/window_choice.hpp"

namespace holmes {

class WindowVote {
public:
  // What calls take a rank, or all of them added up, seconds per byte; 0: unknown. Infinite: not this way.
  struct Costs {
    float ring = 0;
    float window = 0;
    static Costs from(std::uint64_t word);
    std::uint64_t word() const;
    // 0 and infinite ones stay what they are.
    Costs operator+(const Costs& other) const;
  };

  // Whether a rank's share of so many bytes is worth a vote.
  static bool concerns(std::size_t bytes, int ranks);

  // Whether the next call of `operation` (any number) with `bytes` goes through windows.
  bool shows(int operation, std::size_t bytes) const;
  // What this rank tells the others in it. `use`: of its channels.
  Costs costs(int operation, std::size_t bytes, CmaUse use) const;
  // It ended, `seconds` after all ranks were there. `total`: of the costs of all ranks, in the same order everywhere.
  void ended(int operation, std::size_t bytes, double seconds, const Costs& total);

private:
  static constexpr std::size_t trial_samples = 3;
  struct Size {
    unsigned calls = 0;
    bool prefers_windows = false;
    CopyCost ring, window;
    std::array<double, trial_samples> trial{};  // seconds per byte, of the calls of this trial
  };
  using Key = std::pair<int, int>;  // operation, number of bits of its size
  static Key key(int operation, std::size_t bytes);
  const Size& size(int operation, std::size_t bytes) const;

  std::map<Key, Size> sizes_;
  bool can_ = false;   // all ranks, as told last
  bool must_ = false;  // one of them, so all
};

}  // namespace holmes
