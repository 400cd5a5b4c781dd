#include "holmes/comm/peer_watch.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "holmes/core/fork.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

constexpr std::chrono::milliseconds interval{200};

// Never destroyed: its thread lives as long as the process.
class PeerWatch {
public:
  PeerWatch() {
    std::thread([this] { run(); }).detach();
  }
  void add(const std::weak_ptr<Watched>& watched) {
    {
      const std::lock_guard lock(mutex_);
      watched_.push_back(watched);
    }
    added_.notify_one();
  }
  std::uint64_t epoch() const { return epoch_; }

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

  const std::uint64_t epoch_ = fork_epoch();
  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::weak_ptr<Watched>> watched_;
};

// As the I/O threads: a forked child has none of its parent's.
PeerWatch& peer_watch() {
  static std::atomic<PeerWatch*> current{nullptr};
  static std::atomic<bool> making{false};
  while (true) {
    PeerWatch* const found = current.load();
    if (found && found->epoch() == fork_epoch()) return *found;
    if (making.exchange(true)) continue;
    if (current.load() == found) current.store(new PeerWatch());
    making.store(false);
  }
}

}  // namespace

void watch(const std::weak_ptr<Watched>& watched) { peer_watch().add(watched); }

}  // namespace holmes
