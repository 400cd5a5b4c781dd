#include "holmes/comm/peer_watch.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "holmes/core/fork.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/thread.hpp"

namespace holmes {
namespace {

constexpr std::chrono::milliseconds interval{200};

// Its thread lives as long as the process.
class PeerWatch {
public:
  const std::uint64_t epoch = fork_epoch();

  void add(const std::weak_ptr<Watched>& watched) {
    {
      const std::lock_guard lock(mutex_);
      watched_.push_back(watched);
      if (!is_running_) start_thread("hears of lost peers", [this] { run(); }).detach();
      is_running_ = true;
    }
    added_.notify_one();
  }

private:
  void look() {
    std::vector<std::weak_ptr<Watched>> all;
    {
      std::unique_lock lock(mutex_);
      added_.wait(lock, [this] { return !watched_.empty(); });
      std::erase_if(watched_, [](const auto& one) { return one.expired(); });
      all = watched_;
    }
    for (const auto& one : all)
      if (const auto watched = one.lock()) watched->look();
  }

  void run() {
    while (true) {
      where_memory_allows([this] { look(); });
      std::this_thread::sleep_for(interval);
    }
  }

  std::mutex mutex_;
  bool is_running_ = false;
  std::condition_variable added_;
  std::vector<std::weak_ptr<Watched>> watched_;
};

}  // namespace

void watch(const std::weak_ptr<Watched>& watched) { own_of_process<PeerWatch>().add(watched); }

}  // namespace holmes
