// PortEvents: what an HCA tells of itself, of a port and of its queue pairs without being asked.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <set>

#include "holmes/core/clock.hpp"
#include "holmes/transport/rdma/library.hpp"

namespace holmes {

// Of all that use a context's one port: what one of them reads here, all see. Thread-safe.
class PortEvents {
public:
  // A port that is back within that time has lost nothing.
  static constexpr auto longest_flap = std::chrono::milliseconds(300);

  PortEvents(const verbs::Library& library, verbs::Context* context, std::uint8_t port);

  // Readable where there is something to read.
  int fd() const { return context_->async_fd; }
  // Reads what there is, where that was not just done: each look is a system call.
  void look(Clock::time_point now);
  // It is known that there is nothing.
  void looked(Clock::time_point now) { look_at_.store(now + pause, std::memory_order_relaxed); }

  bool has_hca_failed() const { return has_hca_failed_.load(std::memory_order_relaxed); }
  bool has_failed(const verbs::QueuePair* pair) const;
  // When it was read that the port is down; absent: it is not.
  std::optional<Clock::time_point> down_since() const;
  // What was read is over, whoever missed that.
  void set_active() { down_since_.store(never, std::memory_order_relaxed); }
  // Ends; another one may have its address.
  void forget(const verbs::QueuePair* pair);

private:
  static constexpr Clock::time_point never{};
  static constexpr auto pause = std::chrono::milliseconds(2);
  void take(const verbs::AsyncEvent& event, Clock::time_point now);

  const verbs::Library& library_;
  verbs::Context* context_;
  int port_;
  std::atomic<Clock::time_point> look_at_{never};
  std::atomic<Clock::time_point> down_since_{never};
  std::atomic<bool> has_hca_failed_{false};
  std::atomic<std::size_t> failed_count_{0};
  mutable std::mutex mutex_;  // protects what follows, and is held while events are read
  std::set<const verbs::QueuePair*> failed_;
};

}  // namespace holmes
