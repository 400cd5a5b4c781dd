#include "holmes/collectives/all_reduce.hpp"

#include <algorithm>

namespace holmes {

AllReduce::AllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                     Buffer data)
    : Collective(group, signature, std::move(work), deadline),
      data_(std::move(data)),
      own_(block(group.rank)),
      reducer_(group, data_.begin() + own_.begin_bytes, data_.begin() + own_.begin_bytes,
               own_.bytes() / size_bytes(data_.dtype), data_.dtype, *signature.reduction, group.size,
               /*bypass_cache=*/false, group.slice_bytes),
      done_bytes_(static_cast<std::size_t>(group.size)) {}

std::size_t AllReduce::send_total_bytes(int peer) const { return block(peer).bytes() + block(group_.rank).bytes(); }

AllReduce::Position AllReduce::position(std::size_t contributions, std::size_t results, std::size_t done_bytes) const {
  // The stream: contribution slices 0 .. lag-1, then pairs (result slice k, contribution slice k + lag), and when the
  // contributions have ended, the rest of the results.
  const std::size_t slice = group_.slice_bytes;
  const std::size_t head = uses_cma() ? contributions : std::min(contributions, lag * slice);
  if (done_bytes < head) return {done_bytes, 0, true, head - done_bytes};
  if (head == contributions) return {contributions, done_bytes - head, false, head + results - done_bytes};
  // Whole pairs, as long as both kinds fill a slice.
  const std::size_t contributions_left = contributions - head;
  const std::size_t pairs = std::min(results / slice, contributions_left / slice);
  std::size_t rest = done_bytes - head;
  if (rest < pairs * 2 * slice) {
    const std::size_t pair = rest / (2 * slice);
    const std::size_t inside = rest % (2 * slice);
    if (inside < slice) return {head + pair * slice, pair * slice + inside, false, slice - inside};
    return {head + pair * slice + inside - slice, (pair + 1) * slice, true, 2 * slice - inside};
  }
  // The tail: alternate what is left, results first; at most one of the two still has more than a slice.
  rest -= pairs * 2 * slice;
  std::size_t contribution_bytes = head + pairs * slice;
  std::size_t result_bytes = pairs * slice;
  bool contribution_turn = false;
  while (contribution_bytes < contributions || result_bytes < results) {
    std::size_t& bytes = contribution_turn ? contribution_bytes : result_bytes;
    const std::size_t run = std::min(slice, (contribution_turn ? contributions : results) - bytes);
    if (rest < run) {
      bytes += rest;
      return {contribution_bytes, result_bytes, contribution_turn, run - rest};
    }
    rest -= run;
    bytes += run;
    contribution_turn = !contribution_turn;
  }
  return {contributions, results, false, 0};
}

iovec AllReduce::next_send(int peer, std::size_t done_bytes) {
  const Block theirs = block(peer);
  const Position at = position(theirs.bytes(), own_.bytes(), done_bytes);
  if (at.next_is_contribution) return {data_.begin() + theirs.begin_bytes + at.contribution_bytes, at.run_bytes};
  const std::size_t ready = reducer_.reduced_bytes() - std::min(reducer_.reduced_bytes(), at.result_bytes);
  return {data_.begin() + own_.begin_bytes + at.result_bytes, std::min(at.run_bytes, ready)};
}

AllReduce::Position AllReduce::in_position(int peer) const {
  return position(own_.bytes(), block(peer).bytes(), received_bytes(peer));
}

iovec AllReduce::next_recv(int peer, std::size_t done_bytes) {
  const Block theirs = block(peer);
  const Position at = position(own_.bytes(), theirs.bytes(), done_bytes);
  if (!at.next_is_contribution) return {data_.begin() + theirs.begin_bytes + at.result_bytes, at.run_bytes};
  iovec piece = reducer_.next_recv(peer, at.contribution_bytes);
  piece.iov_len = std::min(piece.iov_len, at.run_bytes);
  return piece;
}

bool AllReduce::awaits_peek(int peer) const {
  const Position at = in_position(peer);
  return at.next_is_contribution && reducer_.awaits_peek(peer, at.contribution_bytes);
}

// One slice: a peer may wait for what this rank can send by now.
bool AllReduce::compute() {
  if (reducer_.is_done()) return false;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    if (!header_received(peer)) return false;
  }
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const Position at = in_position(peer);
    done_bytes_[peer] = at.contribution_bytes;
    if (reducer_.is_peeked(peer) && !at.next_is_contribution) return false;
  }
  const std::size_t bytes = reducer_.reduce_next(done_bytes_);
  for (int peer = 0; peer < group_.size; ++peer)
    if (reducer_.is_peeked(peer)) count_received(peer, bytes);
  return bytes > 0;
}

}  // namespace holmes
