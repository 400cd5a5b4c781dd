// ChainBroadcast: from rank to rank, each sending on what it has while the rest arrives. The ranks of a host follow one
// another, so that the data passes each NIC once, however many ranks share it. It takes as many hops as there are
// ranks.
#pragma once

#include <span>

#include "holmes/collectives/collective.hpp"

namespace holmes {

class ChainBroadcast final : public Collective {
public:
  ChainBroadcast(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                 Buffer data);

protected:
  // A rank whose count is another one takes another form, and only all headers tell it.
  bool sends_to(int /*peer*/) const override { return true; }
  bool may_end_early() const override { return true; }
  std::size_t send_total_bytes(int peer) const override { return peer == next_ ? data_.bytes() : 0; }
  std::size_t recv_total_bytes(int peer) const override { return peer == previous_ ? data_.bytes() : 0; }
  iovec next_send(int peer, std::size_t done_bytes) override;
  iovec next_recv(int peer, std::size_t done_bytes) override;

private:
  Buffer data_;
  int previous_ = -1;  // in the chain; -1: none
  int next_ = -1;
};

// All ranks from the root on, those of a cluster together, and of these those that share memory. `order`: as many as
// there are ranks.
void chain_order(const Group& group, int root, std::span<int> order);
std::vector<int> chain_order(const Group& group, int root);

}  // namespace holmes
