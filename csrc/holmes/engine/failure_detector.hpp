// FailureDetector: which peers are gone, and whom to blame where an operation is late.
#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/engine/operations.hpp"

namespace holmes {

// It reads the control connections, and asks the peers over them where a deadline has passed. The driver's.
class FailureDetector {
public:
  // `own_place`: "rank 0 (host a0)".
  FailureDetector(Group& group, const Operations& operations, std::string own_place);

  // Reads what the peers said. Throws the failure that one of them reports.
  void check_controls();
  // Before it was called once, something may be there that nothing makes readable.
  bool has_looked() const { return has_looked_; }
  // Readable when there is something for it.
  pollfd controls_pollfd() const { return {controls_.get(), POLLIN, 0}; }
  // By rank: whose control connection ended.
  const std::vector<char>& lost() const { return lost_; }
  bool has_lost_any() const { return has_lost_any_; }
  bool is_lost(int peer) const { return lost_[static_cast<std::size_t>(peer)] != 0; }
  // Lost, and it said that it destroyed its communicator.
  bool has_left_in_order(int peer) const { return is_lost(peer) && group_.controls[peer]->said_bye(); }
  // Gone for good, with something pending that cannot end without it. A stream that tells its own end is believed
  // rather than the control connection, which may be faster than the last bytes; but not where nothing comes through.
  bool is_missed(int peer) const;
  // A peer that is gone without having said so; absent: there is none.
  std::optional<int> vanished_peer() const;
  [[noreturn]] void throw_peer_lost(int peer, int system_errno) const;
  // What the system says of memory that a caller gave.
  [[noreturn]] void throw_bad_memory(const StreamClosed& closed) const;
  // Waits a little for the peers to say why. Throws the failure.
  [[noreturn]] void throw_stream_closed(const StreamClosed& closed);

  // When to call check_deadlines.
  std::optional<Clock::time_point> next_deadline() const;
  // What ends the communicator where an operation is late; nothing where none is, or others may know more. Throws the
  // failure that a peer reports meanwhile.
  std::optional<Failure> check_deadlines(Clock::time_point now);

  const std::string& own_place() const { return own_place_; }
  // Of an error that this rank sees and `peer` is to blame for.
  ErrorContext context_of(int peer) const;
  ErrorContext own_context() const;

private:
  void check_control(int peer);
  // By rank; nothing where it gave no sign of life.
  using Replies = std::vector<std::optional<ProbeReply>>;
  // A path that nothing gets through, as this rank or one that answered sees it; this rank is never `far`.
  struct Cut {
    int near;
    int far;
    std::string nic;
  };
  // Into an operation of a wide group that is late, here or on a rank that waits for this one.
  struct Inquiry {
    std::uint64_t sequence;   // of the collective that is under way
    std::uint64_t operation;  // of the whole, of which that is a step
    Clock::time_point begun;
    Clock::time_point next_probe;
    std::uint64_t first_probe;
    std::optional<Clock::time_point> late_since{};  // here
    Replies replies;
    std::vector<Clock::time_point> excused_at;  // by rank: when it last said that it waits too
  };

  Replies probe_peers();
  // Does not block: the operation may go on meanwhile. `late`: here.
  std::optional<Failure> inquire(Clock::time_point now, bool late);
  void begin_inquiry(Clock::time_point now);
  void hear_replies(Clock::time_point now);
  std::optional<Failure> find_missing(const std::string& passed) const;
  std::optional<Failure> find_stopped(const std::string& passed, Clock::time_point now) const;
  bool has_inquiry() const {
    return inquiry_ && operations_.running() && operations_.running()->sequence() == inquiry_->sequence;
  }
  // By what is missing here. `overdue`: messages.
  Failure blame(const Replies& replies, bool late, const std::string& overdue) const;
  Failure late_failure(std::string text, const std::optional<int>& culprit, const std::optional<Cut>& cut) const;
  void wait_for_controls(Clock::time_point until) const;
  std::optional<int> unanswered_peer() const;
  std::optional<Cut> find_cut(const Replies& replies) const;
  // Whether what is under way needs `peer`: all of it, messages alone.
  bool involves(int peer) const { return operations_.runs_with(peer) || p2p_needs(peer); }
  bool p2p_needs(int peer) const { return operations_.p2p().needs(peer, group_.controls[peer]->said_bye()); }
  template <typename Wanted>
  std::optional<int> first_peer(const Wanted& is_wanted) const;
  template <typename Visit>
  void for_each_peer(const Visit& visit) const;  // that is there

  Group& group_;
  const Operations& operations_;
  const std::string own_place_;
  const UniqueFd controls_;  // an epoll of all control connections
  std::vector<char> lost_;
  bool has_lost_any_ = false;
  bool has_looked_ = false;  // at all of them, once: bytes may wait behind a TLS handshake
  // Deadlines have passed, but the failure is left to the peers until then.
  std::optional<Clock::time_point> deferred_until_;
  std::optional<Inquiry> inquiry_;
  std::uint64_t probes_ = 0;  // that were sent
};

}  // namespace holmes
