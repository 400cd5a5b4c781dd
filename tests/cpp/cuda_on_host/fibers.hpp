// The threads of one block at a time, as fibers of the thread that launches.
#pragma once

#include <cstring>
#include <functional>

namespace on_host {

constexpr unsigned warp_threads = 32;

struct Index {
  unsigned x;
};

Index this_thread();
Index this_block();
Index this_grid();

// Runs `body` for each thread of each block. Ends the process where a thread ends while others of its block wait for
// it.
void launch(unsigned blocks, unsigned threads, const std::function<void()>& body);

// Waits for the other threads of the block, or of the warp; what they did before is seen behind it.
void meet_block();
void meet_warp();

// This thread's place for what its warp exchanges; `lane`: another's.
void* slot_of(unsigned lane);

// The `value` of that lane of the warp, this thread's own where there is none.
template <typename T>
T from_lane(T value, unsigned lane) {
  std::memcpy(slot_of(this_thread().x % warp_threads), &value, sizeof(T));
  meet_warp();
  if (lane < warp_threads) std::memcpy(&value, slot_of(lane), sizeof(T));
  meet_warp();
  return value;
}

}  // namespace on_host
