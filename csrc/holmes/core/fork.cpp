#include "holmes/core/fork.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

#include "holmes/core/descriptors.hpp"

namespace holmes {
namespace {

std::atomic<std::uint64_t> epoch{0};

struct OpenSockets {
  std::mutex mutex;
  std::vector<const UninheritedSockets*> entries;
  UniqueFd nothing = event_fd();
  // Without allocating.
  void after_fork_in_child() {
    for (const UninheritedSockets* entry : entries) entry->let_go(nothing.get());
  }
};

OpenSockets& open_sockets() { return fork_registry<OpenSockets>(); }

}  // namespace

std::uint64_t fork_epoch() {
  // Counted from the first time that somebody asks: nobody knows of an earlier fork.
  [[maybe_unused]] static const int counted = ::pthread_atfork(nullptr, nullptr, [] { epoch.fetch_add(1); });
  return epoch.load(std::memory_order_relaxed);
}

UninheritedSockets::UninheritedSockets(std::vector<int> fds) : fds_(std::move(fds)) {
  OpenSockets& known = open_sockets();
  std::lock_guard lock(known.mutex);
  known.entries.push_back(this);
}

UninheritedSockets::~UninheritedSockets() {
  OpenSockets& known = open_sockets();
  std::lock_guard lock(known.mutex);
  std::erase(known.entries, this);
}

void UninheritedSockets::let_go(int nothing_fd) const noexcept {
  for (const int fd : fds_) ::dup3(nothing_fd, fd, O_CLOEXEC);
}

}  // namespace holmes
