#include "holmes/collectives/reduce_scatter.hpp"

namespace holmes {

ReduceScatter::ReduceScatter(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                             Buffer output, std::vector<Buffer> inputs)
    : Collective(group, signature, std::move(work), deadline),
      output_(std::move(output)),
      inputs_(std::move(inputs)),
      reducer_(group, inputs_[group.rank].begin(), output_.begin(), inputs_[group.rank].count, signature.dtype,
               *signature.reduction, signature.average_over.value_or(group.size), output_.bytes() >= cache_bypass_bytes,
               group.slice_bytes),
      done_bytes_(static_cast<std::size_t>(group.size)) {}

iovec ReduceScatter::next_send(int peer, std::size_t done_bytes) {
  return {inputs_[peer].begin() + done_bytes, inputs_[peer].bytes() - done_bytes};
}

bool ReduceScatter::awaits_peek(int peer) const { return reducer_.awaits_peek(peer, received_bytes(peer)); }

// One slice: a peer may wait for what this rank can send by now.
bool ReduceScatter::compute() {
  if (reducer_.is_done()) return false;
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
