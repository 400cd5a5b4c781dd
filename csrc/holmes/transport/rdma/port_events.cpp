#include "holmes/transport/rdma/port_events.hpp"

#include <fcntl.h>

#include <cerrno>

namespace holmes {

PortEvents::PortEvents(const verbs::Library& library, verbs::Context* context, std::uint8_t port)
    : library_(library), context_(context), port_(port) {
  ::fcntl(context->async_fd, F_SETFL, ::fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
}

void PortEvents::look(Clock::time_point now) {
  if (now < look_at_.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;  // another one looks
  looked(now);
  // It is acknowledged whatever it is, once it is taken: what it is of ends only then.
  verbs::AsyncEvent event{};
  errno = EAGAIN;
  for (; library_.get_async_event(context_, &event) == 0; errno = EAGAIN) {
    take(event, now);
    library_.acknowledge_async_event(&event);
  }
  if (errno != EAGAIN && errno != EINTR) has_hca_failed_.store(true, std::memory_order_relaxed);  // it was removed
}

void PortEvents::take(const verbs::AsyncEvent& event, Clock::time_point now) {
  switch (event.type) {
    case verbs::EventType::port_error:
      if (event.of.port == port_ && !down_since()) down_since_.store(now, std::memory_order_relaxed);
      break;
    case verbs::EventType::port_active:
      if (event.of.port == port_) set_active();
      break;
    case verbs::EventType::device_fatal:
      has_hca_failed_.store(true, std::memory_order_relaxed);
      break;
    case verbs::EventType::qp_fatal:
      failed_.insert(event.of.pair);
      failed_count_.store(failed_.size(), std::memory_order_relaxed);
      break;
    default:  // GIDs, P_Keys, subnet managers: what is in use goes on
      break;
  }
}

bool PortEvents::has_failed(const verbs::QueuePair* pair) const {
  if (failed_count_.load(std::memory_order_relaxed) == 0) return false;
  const std::lock_guard lock(mutex_);
  return failed_.contains(pair);
}

std::optional<Clock::time_point> PortEvents::down_since() const {
  const auto since = down_since_.load(std::memory_order_relaxed);
  return since == never ? std::nullopt : std::optional(since);
}

void PortEvents::forget(const verbs::QueuePair* pair) {
  const std::lock_guard lock(mutex_);
  failed_.erase(pair);
  failed_count_.store(failed_.size(), std::memory_order_relaxed);
}

}  // namespace holmes
