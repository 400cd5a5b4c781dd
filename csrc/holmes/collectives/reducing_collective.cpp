#include "holmes/collectives/reducing_collective.hpp"

namespace holmes {

ReducingCollective::ReducingCollective(Group& group, Signature signature, std::shared_ptr<Work> work,
                                       Clock::time_point deadline, SliceReducer reducer)
    : Collective(group, signature, std::move(work), deadline),
      reducer_(std::move(reducer)),
      contributed_bytes_(static_cast<std::size_t>(group.size)) {}

bool ReducingCollective::awaits_peek(int peer) const {
  const auto bytes = contributed_bytes(peer);
  return bytes && has_room() && reducer_.awaits_peek(peer, *bytes);
}

// One slice: a peer may wait for what this rank can send by now.
bool ReducingCollective::compute() {
  if (reducer_.is_done() || !has_room()) return false;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    if (!header_received(peer)) return false;
    const auto bytes = contributed_bytes(peer);
    if (!bytes) return false;
    contributed_bytes_[peer] = *bytes;
  }
  const std::size_t bytes = reducer_.reduce_next(contributed_bytes_);
  for (int peer = 0; peer < group_.size; ++peer)
    if (reducer_.is_peeked(peer)) count_received(peer, bytes);
  return bytes > 0;
}

}  // namespace holmes
