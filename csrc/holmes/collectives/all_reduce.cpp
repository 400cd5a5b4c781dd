#include "holmes/collectives/all_reduce.hpp"

#include <algorithm>

namespace holmes {

AllReduce::AllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                     Buffer data)
    : AllReduce(group, signature, std::move(work), deadline, data, equal_block(data.bytes(), group.size, group.rank)) {}

AllReduce::AllReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                     Buffer data, Block own)
    : ReducingCollective(
          group, signature, std::move(work), deadline,
          SliceReducer(group, data.begin() + own.begin_bytes, data.begin() + own.begin_bytes,
                       own.bytes() / size_bytes(data.dtype), data.dtype, *signature.reduction,
                       signature.average_over.value_or(group.size), /*bypass_cache=*/false, group.slice_bytes)),
      data_(std::move(data)),
      own_(own) {}

std::size_t AllReduce::send_total_bytes(int peer) const { return block(peer).bytes() + block(group_.rank).bytes(); }

AllReduce::Position AllReduce::position(std::size_t contributions, std::size_t results, std::size_t done_bytes) const {
  // The stream: contribution slices 0 .. lag-1, then pairs (result slice k, contribution slice k + lag), and when the
  // contributions have ended, the rest of the results.
  const std::size_t slice = group_.slice_bytes;
  const bool all_before = copy_way() != CopyWay::ring || group_.is_far || group_.is_direct;
  const std::size_t head = all_before ? contributions : std::min(contributions, lag * slice);
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

bool AllReduce::append_touched(Touched& touched) const {
  touched.add(data_);
  return true;
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

// A peer whose slices are looked at in place shows the one that is next: it must be a contribution.
std::optional<std::size_t> AllReduce::contributed_bytes(int peer) const {
  const Position at = in_position(peer);
  if (reducer_.is_peeked(peer) && !at.next_is_contribution) return std::nullopt;
  return at.contribution_bytes;
}

}  // namespace holmes
