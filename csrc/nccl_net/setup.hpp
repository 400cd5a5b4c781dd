// Setup: a connection that is being made, in a thread of its own: NCCL asks again and again and must not wait.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <system_error>
#include <thread>

#include "nccl_net/network.hpp"

namespace holmes::nccl_net {

// One thread at a time.
class Setup {
public:
  // Begins. `make` may block, for as long as a connection's set-up may take, also after this object is gone. Throws
  // SystemError where no thread can be had.
  explicit Setup(std::function<Pair()> make) {
    std::packaged_task<Pair()> task(std::move(make));
    made_ = task.get_future();
    try {
      std::thread(std::move(task)).detach();
    } catch (const std::system_error& error) {
      throw SystemError("cannot start the thread that makes a connection: " + errno_text(error.code().value()) +
                            limit_text(error.code().value()),
                        {.system_errno = error.code().value()});
    }
  }

  // What was made, once; nothing while that goes on. Throws what failed it.
  std::optional<Pair> poll() {
    asked_at_ = Clock::now();
    if (made_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return std::nullopt;
    return made_.get();
  }
  // When poll was last called.
  Clock::time_point asked_at() const { return asked_at_; }

private:
  std::future<Pair> made_;
  Clock::time_point asked_at_ = Clock::now();
};

}  // namespace holmes::nccl_net
