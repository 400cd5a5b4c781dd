// OwedHeaders: of collectives that have ended on this rank, those headers of other ranks that are still to come.
#pragma once

#include <cstddef>
#include <vector>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/core/clock.hpp"
#include "holmes/group/group.hpp"

namespace holmes {

// Nothing follows them but later operations; what the ranks disagree about they tell all the same
// (CommunicatorOptions::local_completion). They are read when something is wanted that follows them, and now and then.
class OwedHeaders {
public:
  explicit OwedHeaders(Group& group);

  // `own`: what this rank sent to `peer`. `theirs`: what has come, its first `got_bytes`. `deadline`: until when the
  // operation waits for it.
  void add(int peer, const CollectiveHeader& own, const CollectiveHeader& theirs, std::size_t got_bytes,
           Clock::time_point deadline);
  // Takes the memory that `add` needs once for each peer, which then throws nothing.
  void reserve();
  // After those of one operation were added: looks for what has come, now and then. Throws as `receive`.
  void added();
  // Reads what is there, of each peer in order. Returns whether anything came. Throws MismatchError, StreamClosed, ...
  bool receive();
  // Whether one more operation may end here: a rank may be so many ahead of each other one.
  bool has_room() const { return has_room_from(most_ahead); }
  // Whether one that has waited for room is to go on: it waits once for many operations, not for each.
  bool has_much_room() const { return has_room_from(most_ahead / 2); }
  // Whether a peer of which `is_there(peer)` owes anything yet whose time is not up.
  template <typename IsThere>
  bool is_owed(Clock::time_point now, const IsThere& is_there) const {
    for (std::size_t peer = 0; count_ > 0 && peer < queues_.size(); ++peer)
      if (!queues_[peer].is_empty() && queues_[peer].headers.back().deadline > now && is_there(static_cast<int>(peer)))
        return true;
    return false;
  }
  void clear();

private:
  // Operations that a rank may be ahead of each other one.
  static constexpr std::size_t most_ahead = 64;

  bool has_room_from(std::size_t limit) const;
  struct Header {
    CollectiveHeader own;
    CollectiveHeader theirs;
    std::size_t got_bytes;
    Clock::time_point deadline;
  };
  struct Queue {
    std::vector<Header> headers;
    std::size_t first = 0;  // those before it have come
    bool is_empty() const { return first == headers.size(); }
    std::size_t size() const { return headers.size() - first; }
  };
  bool receive(int peer);

  Group& group_;
  std::vector<Queue> queues_;  // by rank
  std::size_t count_ = 0;      // of all
  unsigned unread_ = 0;        // operations that were added since it last looked
};

}  // namespace holmes
