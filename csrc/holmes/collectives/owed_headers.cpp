#include "holmes/collectives/owed_headers.hpp"

#include <algorithm>
#include <array>

namespace holmes {
namespace {

// Operations after which it looks whether their headers have come: so many are read at once.
constexpr unsigned operations_per_look = max_pieces;

}  // namespace

OwedHeaders::OwedHeaders(Group& group) : group_(group), queues_(static_cast<std::size_t>(group.size)) {
  group_.owed.assign(queues_.size(), 0);
}

void OwedHeaders::add(int peer, const CollectiveHeader& own, const CollectiveHeader& theirs, std::size_t got_bytes,
                      Clock::time_point deadline) {
  queues_[static_cast<std::size_t>(peer)].headers.push_back({own, theirs, got_bytes, deadline});
  ++group_.owed[static_cast<std::size_t>(peer)];
  ++count_;
}

void OwedHeaders::reserve() {
  for (auto& [headers, first] : queues_)
    if (headers.size() == headers.capacity()) headers.reserve(headers.size() + most_ahead);
}

void OwedHeaders::added() {
  if (++unread_ >= operations_per_look) receive();
}

bool OwedHeaders::has_room_from(std::size_t limit) const {
  return count_ < limit || std::ranges::all_of(queues_, [=](const Queue& queue) { return queue.size() < limit; });
}

bool OwedHeaders::receive() {
  unread_ = 0;
  bool any = false;
  for (int peer = 0; count_ > 0 && peer < group_.size; ++peer) any |= receive(peer);
  return any;
}

bool OwedHeaders::receive(int peer) {
  Queue& queue = queues_[static_cast<std::size_t>(peer)];
  bool any = false;
  bool goes_on = true;
  while (goes_on && !queue.is_empty()) {
    const std::span next(queue.headers.begin() + static_cast<std::ptrdiff_t>(queue.first),
                         std::min(queue.size(), max_pieces));
    std::array<iovec, max_pieces> pieces;
    std::size_t count = 0;
    std::size_t wanted = 0;
    for (Header& header : next) {
      const std::size_t rest = sizeof header.theirs - header.got_bytes;  // 0: it did not fit, and is told once more
      if (rest > 0) pieces[count++] = {reinterpret_cast<std::byte*>(&header.theirs) + header.got_bytes, rest};
      wanted += rest;
    }
    std::size_t came =
        wanted > 0 ? group_.channels[static_cast<std::size_t>(peer)]->try_recv({pieces.data(), count}) : 0;
    any |= came > 0;
    goes_on = came == wanted;
    for (Header& header : next) {
      const std::size_t bytes = std::min(came, sizeof header.theirs - header.got_bytes);
      header.got_bytes += bytes;
      came -= bytes;
      if (header.got_bytes < sizeof header.theirs) break;
      check_header(header.own, header.theirs, group_, peer);
      ++queue.first;
      --count_;
    }
  }
  group_.owed[static_cast<std::size_t>(peer)] = static_cast<std::uint32_t>(queue.size());
  if (queue.is_empty() || queue.first >= most_ahead) {
    queue.headers.erase(queue.headers.begin(), queue.headers.begin() + static_cast<std::ptrdiff_t>(queue.first));
    queue.first = 0;
  }
  return any;
}

void OwedHeaders::clear() {
  for (Queue& queue : queues_) queue = {};
  std::ranges::fill(group_.owed, 0);
  count_ = 0;
}

}  // namespace holmes
