#include "holmes/collectives/gather_reduce.hpp"

#include <algorithm>

namespace holmes {

GatherReduce::GatherReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                           Buffer data)
    : Collective(group, signature, std::move(work), deadline),
      data_(std::move(data)),
      root_(*signature.root),
      reducer_(group, data_.begin() + block(group.rank).begin_bytes, SliceReducer::in_staging,
               block(group.rank).bytes() / size_bytes(data_.dtype), data_.dtype, *signature.reduction, group.size,
               /*bypass_cache=*/false, std::min(group.slice_bytes, most_slice_bytes)),
      done_bytes_(static_cast<std::size_t>(group.size)) {}

void GatherReduce::start() {
  if (!is_root()) reducer_.start();
}

std::size_t GatherReduce::send_total_bytes(int peer) const { return block(peer == root_ ? group_.rank : peer).bytes(); }

std::size_t GatherReduce::recv_total_bytes(int peer) const { return block(is_root() ? peer : group_.rank).bytes(); }

iovec GatherReduce::next_send(int peer, std::size_t done_bytes) {
  if (peer == root_) return reducer_.next_result(done_bytes);
  const Block theirs = block(peer);
  return {data_.begin() + theirs.begin_bytes + done_bytes, theirs.bytes() - done_bytes};
}

// A result overwrites the root's contribution to it, which must have come to whom reduced it.
iovec GatherReduce::next_recv(int peer, std::size_t done_bytes) {
  if (!is_root()) return reducer_.next_recv(peer, done_bytes);
  const Block theirs = block(peer);
  return {data_.begin() + theirs.begin_bytes + done_bytes, theirs.bytes() - done_bytes};
}

bool GatherReduce::awaits_peek(int peer) const {
  return !is_root() && reducer_.has_room(sent_bytes(root_)) && reducer_.awaits_peek(peer, received_bytes(peer));
}

// One slice: the root may wait for it.
bool GatherReduce::compute() {
  if (reducer_.is_done() || !reducer_.has_room(sent_bytes(root_))) return false;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    if (!header_received(peer)) return false;
    done_bytes_[peer] = received_bytes(peer);
  }
  const std::size_t bytes = reducer_.reduce_next(done_bytes_);
  for (int peer = 0; peer < group_.size; ++peer)
    if (reducer_.is_peeked(peer)) count_received(peer, bytes);
  return bytes > 0;
}

}  // namespace holmes
