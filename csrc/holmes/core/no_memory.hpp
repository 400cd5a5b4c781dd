// What to do where memory is short for a moment, or for longer.
#pragma once

#include <chrono>
#include <new>
#include <thread>

#include "holmes/core/clock.hpp"

namespace holmes {

// For what may be left out.
template <typename Action>
void where_memory_allows(const Action& action) {
  try {
    action();
  } catch (const std::bad_alloc&) {
    return;
  }
}

// For what has to be, as others wait for it: what `make` returns, which is tried for up to a second, else what `spare`
// returns, which takes no memory.
template <typename Make, typename Spare>
auto made_or(const Make& make, const Spare& spare) {
  constexpr std::chrono::seconds patience{1};
  constexpr std::chrono::milliseconds pause{1};
  const auto until = Clock::now() + patience;
  while (true) {
    try {
      return make();
    } catch (const std::bad_alloc&) {
      if (Clock::now() >= until) return spare();
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace holmes
