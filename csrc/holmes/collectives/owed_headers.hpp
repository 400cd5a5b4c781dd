// OwedHeaders: of a collective that has ended on this rank, those headers of other ranks that are still to come.
#pragma once

#include <cstddef>
#include <vector>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/core/clock.hpp"
#include "holmes/group/group.hpp"

namespace holmes {

// Nothing follows them; what the ranks disagree about they tell all the same (CommunicatorOptions::local_completion).
class OwedHeaders {
public:
  explicit OwedHeaders(Clock::time_point deadline) : deadline_(deadline) {}

  // `own`: what this rank sent to `peer`. `theirs`: what has come, its first `got_bytes`.
  void add(int peer, const CollectiveHeader& own, const CollectiveHeader& theirs, std::size_t got_bytes) {
    missing_.push_back({peer, own, theirs, got_bytes});
  }
  // Reads what is there, but for peers that `group.owed` marks, who owe an earlier one; marks those that owe this one.
  // Returns whether anything came. Throws MismatchError, StreamClosed, ...
  bool receive(Group& group);
  bool is_empty() const { return missing_.empty(); }
  // Until when the operation waits for them.
  Clock::time_point deadline() const { return deadline_; }

private:
  struct Header {
    int peer;
    CollectiveHeader own;
    CollectiveHeader theirs;
    std::size_t got_bytes;
  };
  Clock::time_point deadline_;
  std::vector<Header> missing_;
};

}  // namespace holmes
