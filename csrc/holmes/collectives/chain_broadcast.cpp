#include "holmes/collectives/chain_broadcast.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace holmes {

std::vector<int> chain_order(const std::vector<int>& memory_leaders, int root) {
  const int size = static_cast<int>(memory_leaders.size());
  const auto leader = [&](int rank) { return memory_leaders[static_cast<std::size_t>(rank)]; };
  const auto place = [&](int rank) {
    return std::tuple((leader(rank) - leader(root) + size) % size, rank != root, rank);
  };
  std::vector<int> order(memory_leaders.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, place);
  return order;
}

ChainBroadcast::ChainBroadcast(Group& group, Signature signature, std::shared_ptr<Work> work,
                               Clock::time_point deadline, Buffer data)
    : Collective(group, signature, std::move(work), deadline), data_(std::move(data)) {
  const std::vector<int> order = chain_order(group.memory_leaders, *signature.root);
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
