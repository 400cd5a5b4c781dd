// ShortExchange: a collective of few bytes (most_short_bytes between two ranks) and few ranks that share memory,
// carried out whole in the thread that calls it: from the stack into the rings, and out of them once everything is
// there.
#pragma once

#include <array>
#include <vector>

#include "holmes/collectives/collective_header.hpp"
#include "holmes/collectives/owed_headers.hpp"

namespace holmes {

// On the wire it is what Exchange, OneStepAllReduce and ReduceScatter are, so each rank decides for itself; and what
// takes longer goes on as one of these (Collective::set_sent). Where the group's operations end locally, so does this.
class ShortExchange {
public:
  static constexpr int most_ranks = 8;

  ShortExchange(Group& group, const Signature& signature);
  // What goes to and comes from `peer`, or is copied where that is this rank. Once for every rank.
  void set(int peer, const void* sent, std::size_t sent_bytes, void* received, std::size_t received_bytes);
  // What comes is reduced, in rank order and with what this rank `sent` to itself, into what it receives from itself.
  void set_reduction(std::size_t count) { reduced_count_ = count; }

  Signature& signature() { return signature_; }
  const Signature& signature() const { return signature_; }
  // Whether all of it can be sent now.
  bool has_room() const;
  void send();
  // Takes what came, where everything is there that this rank waits for. (What does not fit is not, ever: the
  // collective tells of it.)
  bool take();
  // After `take`: headers of those that nothing else comes from, where they are still to come. Whether there are any.
  bool append_owed(OwedHeaders& owed, Clock::time_point deadline) const;

private:
  struct Flow {
    CollectiveHeader out;
    const void* sent;
    void* received;
    std::size_t sent_bytes;
    std::size_t received_bytes;
    const std::byte* payload;  // where it came
    bool is_owed;
  };
  bool talks_to(int peer) const { return !ends_early_ || signature_.root == group_.rank || signature_.root == peer; }
  bool look_at(int peer);
  void finish();

  Group& group_;
  Signature signature_;
  bool ends_early_;
  std::size_t reduced_count_ = 0;
  std::array<Flow, most_ranks> flows_;  // as many as there are ranks
};

}  // namespace holmes
