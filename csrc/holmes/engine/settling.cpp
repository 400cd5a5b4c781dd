#include "holmes/engine/settling.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <thread>

#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/work.hpp"

namespace holmes {
namespace {

// A child has none of the threads that settle its parent's.
struct Settling {
  std::uint64_t epoch = fork_epoch();
  std::atomic<int> communicators{0};
};

Settling& own_settling() { return own_of_process<Settling>(); }

}  // namespace

void begin_settling() {
  [[maybe_unused]] static const int registered = std::atexit(wait_until_settled);
  ++own_settling().communicators;
}

void end_settling() { --own_settling().communicators; }

void wait_until_settled() {
  constexpr auto patience = std::chrono::seconds(5);
  constexpr auto pause = std::chrono::milliseconds(1);
  const auto start = Clock::now();
  const Settling& own = own_settling();
  for (bool is_told = false; own.communicators > 0; std::this_thread::sleep_for(pause)) {
    if (is_told || Clock::now() - start < patience) continue;
    is_told = true;
    log(LogLevel::warn, std::nullopt,
        "this process waits at its end for ranks that have not entered operations with a root that ended here "
        "(local_completion), until the operations' deadlines");
  }
}

}  // namespace holmes
