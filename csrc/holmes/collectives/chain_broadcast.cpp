#include "holmes/collectives/chain_broadcast.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace holmes {

void chain_order(const Group& group, int root, std::span<int> order) {
  // How many ranks further the first of its like is.
  const auto distance = [&](const std::vector<int>& leaders, int rank) {
    const auto leader = [&](int of_rank) { return leaders[static_cast<std::size_t>(of_rank)]; };
    return (leader(rank) - leader(root) + group.size) % group.size;
  };
  const auto place = [&](int rank) {
    return std::tuple(distance(group.cluster_leaders, rank), distance(group.memory_leaders, rank), rank != root, rank);
  };
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, place);
}

std::vector<int> chain_order(const Group& group, int root) {
  std::vector<int> order(static_cast<std::size_t>(group.size));
  chain_order(group, root, order);
  return order;
}

ChainBroadcast::ChainBroadcast(Group& group, Signature signature, std::shared_ptr<Work> work,
                               Clock::time_point deadline, Buffer data)
    : Collective(group, signature, std::move(work), deadline), data_(std::move(data)) {
  const std::vector<int> order = chain_order(group, *signature.root);
  const auto own = std::ranges::find(order, group.rank);
  if (own != order.begin()) previous_ = *std::prev(own);
  if (std::next(own) != order.end()) next_ = *std::next(own);
}

iovec ChainBroadcast::next_send(int /*peer*/, std::size_t done_bytes) {
  const std::size_t there = previous_ < 0 ? data_.bytes() : received_bytes(previous_);
  return {data_.begin() + done_bytes, there - std::min(there, done_bytes)};
}

iovec ChainBroadcast::next_recv(int /*peer*/, std::size_t done_bytes) {
  return {data_.begin() + done_bytes, data_.bytes() - done_bytes};
}

}  // namespace holmes
