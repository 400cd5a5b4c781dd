#include "holmes/collectives/tree_broadcast.hpp"

#include <algorithm>
#include <bit>

#include "holmes/collectives/chain_broadcast.hpp"

namespace holmes {

// A binomial tree over those of `ranks` that lead, the first one of which is its root; nothing where `rank` does not.
// `leads(before, rank)`: whether a rank leads that follows another one.
template <typename Leads>
void TreePlace::add_level(std::span<const int> ranks, int rank, const Leads& leads) {
  const auto does_lead = [&](std::size_t at) { return at == 0 || leads(ranks[at - 1], ranks[at]); };
  const auto leaders_before = [&](std::size_t end) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < end; ++at) count += does_lead(at);
    return count;
  };
  const auto leader = [&](std::size_t number) {
    std::size_t at = 0;
    while (!does_lead(at) || number-- > 0) ++at;
    return ranks[at];
  };
  const auto own_at = static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
  if (!does_lead(own_at)) return;
  const std::size_t own = leaders_before(own_at);
  const std::size_t count = leaders_before(ranks.size());
  // Below it are as many as its lowest bit says.
  const std::size_t below = own == 0 ? std::bit_ceil(count) : own & (~own + 1);
  if (own != 0) parent_ = leader(own - below);
  for (std::size_t step = below / 2; step > 0; step /= 2)
    if (own + step < count) children_[static_cast<std::size_t>(child_count_++)] = leader(own + step);
}

TreePlace::TreePlace(const Group& group, std::span<const int> order, int rank) {
  const auto differ_in = [](const std::vector<int>& leaders, int one, int other) {
    return leaders[static_cast<std::size_t>(one)] != leaders[static_cast<std::size_t>(other)];
  };
  const auto other_cluster = [&](int one, int other) { return differ_in(group.cluster_leaders, one, other); };
  const auto other_host = [&](int one, int other) {
    return other_cluster(one, other) || differ_in(group.memory_leaders, one, other);
  };
  // Those of the order that are with this rank.
  const auto part = [&](const auto& is_elsewhere) {
    const auto is_here = [&](int other) { return !is_elsewhere(rank, other); };
    const auto begin = std::ranges::find_if(order, is_here);
    return std::span<const int>(begin, std::find_if_not(begin, order.end(), is_here));
  };
  add_level(order, rank, other_cluster);
  add_level(part(other_cluster), rank, other_host);
  add_level(part(other_host), rank, [](int, int) { return true; });
}

bool TreePlace::is_child(int peer) const { return std::ranges::find(children(), peer) != children().end(); }

TreeBroadcast::TreeBroadcast(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                             Buffer data)
    : Collective(group, signature, std::move(work), deadline),
      data_(std::move(data)),
      place_(group, chain_order(group, *signature.root), group.rank) {}

iovec TreeBroadcast::next_send(int /*peer*/, std::size_t done_bytes) {
  const std::size_t there = place_.parent() < 0 ? data_.bytes() : received_bytes(place_.parent());
  return {data_.begin() + done_bytes, there - std::min(there, done_bytes)};
}

iovec TreeBroadcast::next_recv(int /*peer*/, std::size_t done_bytes) {
  return {data_.begin() + done_bytes, data_.bytes() - done_bytes};
}

}  // namespace holmes
