#include "holmes/transport/shm/window_choice.hpp"

#include <algorithm>

namespace holmes {
namespace {

// Where a copy through the kernel is the slower way it was up to 4 times as slow: a trial in so much costs 5 %.
constexpr std::size_t trials_apart = 64;
// By so much it has to be cheaper.
constexpr double worth = 0.9;
// A copy that takes long was interrupted.
constexpr double weight = 0.2;
constexpr double max_growth = 2;

}  // namespace

void CopyCost::add(std::size_t bytes, double seconds) {
  const double cost = seconds / static_cast<double>(bytes);
  average_ = average_ == 0 ? cost : average_ + weight * (std::min(cost, max_growth * average_) - average_);
}

bool WindowChoice::shows(std::size_t bytes, std::optional<bool> set) const {
  if (bytes < min_window_bytes || use_ == CmaUse::never) return false;
  return set.value_or(use_ == CmaUse::always || is_better_ != is_trial_);
}

void WindowChoice::sent(std::size_t bytes, const WayCosts& costs) {
  if (use_ != CmaUse::measured) return;
  left_ -= std::min(left_, bytes);
  if (left_ > 0) return;
  if (is_trial_ && costs.ring > 0 && costs.window > 0) is_better_ = costs.window < worth * costs.ring;
  is_trial_ = !is_trial_;
  left_ = is_trial_ ? trial_bytes_ : trials_apart * trial_bytes_;
}

void WindowChoice::give_up() {
  use_ = CmaUse::never;
  is_better_ = false;
}

}  // namespace holmes
