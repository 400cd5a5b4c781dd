// TreeBroadcast: few bytes from the root along a tree, each rank sending on what it has. The root's NIC carries them
// log2(n) times, and not once for each rank.
#pragma once

#include <array>
#include <span>

#include "holmes/collectives/collective.hpp"

namespace holmes {

// Where a rank is in the tree: a binomial one over the clusters' first ranks, from each of these one over those of its
// hosts, and from each of these one over the host's others. So the data enters each cluster and each host once.
class TreePlace {
public:
  // `order`: as of chain_order.
  TreePlace(const Group& group, std::span<const int> order, int rank);
  // -1: of the root.
  int parent() const { return parent_; }
  // Those with more below them first.
  std::span<const int> children() const { return {children_.data(), static_cast<std::size_t>(child_count_)}; }
  bool is_child(int peer) const;

private:
  template <typename Leads>
  void add_level(std::span<const int> ranks, int rank, const Leads& leads);

  int parent_ = -1;
  std::array<int, 32> children_;
  int child_count_ = 0;
};

// Where operations end locally: a rank is heard by its parent and its children alone, which it is compared with, and
// so all are.
class TreeBroadcast final : public Collective {
public:
  TreeBroadcast(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline, Buffer data);

protected:
  bool sends_to(int peer) const override { return peer == place_.parent() || place_.is_child(peer); }
  bool may_end_early() const override { return true; }
  std::size_t send_total_bytes(int peer) const override { return place_.is_child(peer) ? data_.bytes() : 0; }
  std::size_t recv_total_bytes(int peer) const override { return peer == place_.parent() ? data_.bytes() : 0; }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override;

private:
  Buffer data_;
  const TreePlace place_;
};

}  // namespace holmes
