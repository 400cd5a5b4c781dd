#include "holmes/collectives/slice_reducer.hpp"

#include <algorithm>

#include "holmes/reduce/reduce.hpp"

namespace holmes {

SliceReducer::SliceReducer(Group& group, const std::byte* own, std::byte* destination, std::size_t count, DType dtype,
                           ReduceOp op, int source_total, bool bypass_cache, std::size_t slice_bytes)
    : group_(group),
      own_(own),
      destination_(destination),
      count_(count),
      dtype_(dtype),
      op_(op),
      source_total_(source_total),
      bypass_cache_(bypass_cache),
      slice_bytes_(slice_bytes) {
  peeked_.resize(static_cast<std::size_t>(group.size));
  sources_.resize(static_cast<std::size_t>(group.size));
  for (int peer = 0; peer < group.size; ++peer)
    if (peer != group.rank) {
      const Channel& channel = *group.channels[peer];
      peeked_[peer] = channel.max_peek_bytes() >= slice_bytes && block_bytes() < channel.lasting_bytes();
    }
}

void SliceReducer::start() {
  staging_ = group_.staging_bytes(static_cast<std::size_t>(group_.size) * slots_per_peer * slice_bytes_);
}

std::size_t SliceReducer::next_bytes() const { return std::min(slice_bytes_, block_bytes() - reduced_bytes_); }

std::byte* SliceReducer::slot(int peer, std::size_t offset_bytes) const {
  const std::size_t index = (offset_bytes / slice_bytes_) % slots_per_peer;
  return staging_ + (static_cast<std::size_t>(peer) * slots_per_peer + index) * slice_bytes_ +
         offset_bytes % slice_bytes_;
}

iovec SliceReducer::next_recv(int peer, std::size_t done_bytes) const {
  if (peeked_[peer]) return {};
  const std::size_t slice_end = (done_bytes / slice_bytes_ + 1) * slice_bytes_;
  const std::size_t limit = std::min({slice_end, block_bytes(), reduced_bytes_ + slots_per_peer * slice_bytes_});
  if (done_bytes >= limit) return {};
  return {slot(peer, done_bytes), limit - done_bytes};
}

iovec SliceReducer::next_result(std::size_t sent_bytes) const {
  const std::size_t slice_end = (sent_bytes / slice_bytes_ + 1) * slice_bytes_;
  const std::size_t limit = std::min(slice_end, reduced_bytes_);
  return {slot(group_.rank, sent_bytes), limit - std::min(limit, sent_bytes)};
}

bool SliceReducer::awaits_peek(int peer, std::size_t done_bytes) const {
  return peeked_[peer] && done_bytes == reduced_bytes_ && !is_done();
}

std::size_t SliceReducer::reduce_next(const std::vector<std::size_t>& done_bytes) {
  if (is_done()) return 0;
  const std::size_t bytes = next_bytes();
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) {
      sources_[peer] = own_ + reduced_bytes_;
    } else if (peeked_[peer]) {
      if (done_bytes[peer] != reduced_bytes_) return 0;
      sources_[peer] = group_.channels[peer]->try_peek(bytes);
      if (!sources_[peer]) return 0;
    } else {
      if (done_bytes[peer] < reduced_bytes_ + bytes) return 0;
      sources_[peer] = slot(peer, reduced_bytes_);
    }
  }
  std::byte* const destination = destination_ ? destination_ + reduced_bytes_ : slot(group_.rank, reduced_bytes_);
  reduce(destination, sources_.data(), group_.size, bytes / size_bytes(dtype_), dtype_, op_, source_total_,
         bypass_cache_);
  for (int peer = 0; peer < group_.size; ++peer)
    if (peeked_[peer]) group_.channels[peer]->consume(bytes);
  reduced_bytes_ += bytes;
  return bytes;
}

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
