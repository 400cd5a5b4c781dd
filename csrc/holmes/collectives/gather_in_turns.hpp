// GatherInTurns: a gather of large parts over the network.
#pragma once

#include <cstddef>

#include "holmes/collectives/exchange.hpp"

namespace holmes {

// Where all send to the root at once, what waits before its NIC gets long (measured: docs/algorithms.md). So the root
// gives one after the other its turn, of those that have entered the operation: a byte, on which the part follows.
// Ranks that share memory with the root, and short parts, wait for none.
class GatherInTurns final : public Exchange {
public:
  // Whether any of what this rank sends or receives waits for a turn. `sends` and `recvs` as of Exchange.
  static bool concerns(const Group& group, int root, std::span<const Buffer> sends, std::span<const Buffer> recvs);

  GatherInTurns(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                std::vector<Buffer> sends, std::vector<Buffer> recvs);

protected:
  iovec next_send(int peer, std::size_t done_bytes) override;

private:
  bool has_turn(int peer);

  std::byte turn_{};
  std::vector<char> begun_;  // of the root, by rank
};

}  // namespace holmes
