#include "holmes/collectives/gather_in_turns.hpp"

#include <algorithm>

namespace holmes {
namespace {

// Shorter ones fit the queues.
constexpr std::size_t min_part_bytes = 256 * 1024;
// What is left of a turn where the next one begins: the word is on its way meanwhile.
constexpr std::size_t early_bytes = 256 * 1024;

// Of a rank that is not the root, as both know it.
bool takes_turns(const Group& group, int root, int rank, std::size_t part_bytes) {
  const auto leader = [&](int of_rank) { return group.memory_leaders[static_cast<std::size_t>(of_rank)]; };
  return group.size > 2 && !group.is_far && !group.is_direct && part_bytes >= min_part_bytes &&
         leader(root) != leader(rank);
}

}  // namespace

bool GatherInTurns::concerns(const Group& group, int root, std::span<const Buffer> sends,
                             std::span<const Buffer> recvs) {
  if (group.rank != root) return takes_turns(group, root, group.rank, sends[static_cast<std::size_t>(root)].bytes());
  for (int rank = 0; rank < group.size; ++rank)
    if (rank != root && takes_turns(group, root, rank, recvs[static_cast<std::size_t>(rank)].bytes())) return true;
  return false;
}

GatherInTurns::GatherInTurns(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                             std::vector<Buffer> sends, std::vector<Buffer> recvs)
    : Exchange(group, signature, std::move(work), deadline, std::move(sends), std::move(recvs)),
      begun_(static_cast<std::size_t>(group.size)) {
  const int root = *signature_.root;
  const Buffer turn{&turn_, 1, DType::uint8};
  if (group_.rank != root) {
    recvs_[root] = turn;
    return;
  }
  for (int rank = 0; rank < group_.size; ++rank)
    if (rank != root && takes_turns(group_, root, rank, recvs_[rank].bytes())) sends_[rank] = turn;
}

iovec GatherInTurns::next_send(int peer, std::size_t done_bytes) {
  iovec piece = Exchange::next_send(peer, done_bytes);
  if (piece.iov_len > 0 && !has_turn(peer)) piece.iov_len = 0;
  return piece;
}

bool GatherInTurns::has_turn(int peer) {
  if (group_.rank != signature_.root) return received_bytes(peer) > 0;
  if (begun_[peer]) return true;
  if (!header_received(peer)) return false;
  std::size_t left = 0;
  for (int rank = 0; rank < group_.size; ++rank)
    if (begun_[rank]) left += recvs_[rank].bytes() - received_bytes(rank);
  if (left > early_bytes) return false;
  begun_[peer] = true;
  return true;
}

}  // namespace holmes
