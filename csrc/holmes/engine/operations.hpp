// Operations: what was called on a communicator and is not finished yet.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "holmes/collectives/collective.hpp"
#include "holmes/collectives/short_call.hpp"
#include "holmes/p2p/p2p.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes {

// Any thread hands operations over; the driver takes them and carries them out: collectives one after the other, sends
// and receives side by side with them. Every one gets its sequence number and its place in the flight recorder here.
class Operations {
public:
  Operations(Group& group, std::vector<std::unique_ptr<Channel>> p2p_channels, int wake_fd);

  // --- any thread ---
  // Takes what it is given; false where it is closed. All of it or, where it throws, nothing.
  bool submit(std::unique_ptr<Collective>& collective);
  bool submit(std::vector<P2pEngine::Request>& requests);
  // Whether there is something that the driver has not taken yet / that is not finished.
  bool has_new() const { return has_new_.load(std::memory_order_acquire); }
  bool is_empty() const { return !has_new() && taken_.load(std::memory_order_acquire) == 0; }
  // Collectives called so far.
  std::uint64_t entered() const;

  // --- driver ---
  // As submit, of what the driver itself calls; false also where other calls wait for their turn.
  bool submit_own(std::unique_ptr<Collective>& collective);
  // Short calls of the driver itself, where nothing else is under way. One is begun, and sent, where it can be; taken
  // where all has gone and come; or goes on as a collective. `submitted`: when it was sent; `record`: its number in the
  // flight recorder. Not while lacks_room.
  struct ShortBegin {
    bool is_begun = false;
    bool all_gone = false;
    Clock::time_point submitted{};
    std::uint64_t record = 0;
  };
  ShortBegin begin_short(ShortCall& called, Duration timeout);
  // Whether this rank is too far ahead of another one to begin one more, and whether others have caught up.
  bool lacks_room() const { return !owed_.has_room(); }
  ShortState catch_up();
  ShortState take_short(ShortCall& called, std::uint64_t record, Clock::time_point deadline);
  void go_on(std::unique_ptr<Collective> collective, const ShortCall& called, std::uint64_t record);
  // When short calls are submitted.
  Clock::time_point short_now() { return clock_.now(); }
  // A message, which is carried out where it is ready.
  ShortState carry_short(const ShortMessage& message, Clock::time_point submitted, Duration timeout);
  // A work that is completed, of a message from `source` or, where that is -1, of anything else.
  const std::shared_ptr<Work>& completed(int source);
  // Throws where what was submitted does not fit what the peer sent; the operation is pending then.
  void take_new();
  // Moves what can be moved without blocking. Returns whether anything moved. Throws StreamClosed, MismatchError, ...
  bool advance();
  // The first collective, or null.
  Collective* running() const { return queue_.empty() ? nullptr : queue_.front().get(); }
  std::size_t awaited_recv_bytes(int peer) const;
  // Of the first collective or, where it has sent all, of one behind it; see Collective.
  std::size_t awaited_send_bytes(int peer) const;
  const P2pEngine& p2p() const { return p2p_; }
  // Whether the collective that is under way needs `peer`.
  bool runs_with(int peer) const;
  std::optional<Clock::time_point> next_deadline() const;
  // Whether a collective is late.
  bool is_late(Clock::time_point now) const;
  std::string describe_running() const;
  // For the flight record; `lost` by rank.
  DriverState state(const std::vector<char>& lost) const;
  // Ends the watches of `peer` (absent: of all), see P2pEngine::take_watches.
  void fail_watches(std::optional<int> peer, const std::exception_ptr& error);
  // Nothing can be submitted any more, and what is pending stays so until fail_all. Neither takes memory.
  void close();
  // What channels keep of operations that have ended here, as far as they take it now.
  void send_kept();
  bool keeps_any() const { return group_.keeps_any; }
  bool keeps_payload() const { return group_.keeps_payload; }
  // What is owed to operations that have ended here, before the end: a connection that is closed while the peer sends
  // loses what it has not taken yet. Whether anything came.
  bool settle();
  // Whether a peer of which `is_there(peer)` owes anything yet, or this rank keeps anything, whose time is not up.
  template <typename IsThere>
  bool is_unsettled(Clock::time_point now, const IsThere& is_there) const {
    return (group_.keeps_any && group_.kept_until > now) || owed_.is_owed(now, is_there);
  }
  bool is_settling() const { return is_settling_; }
  void fail_all(const std::exception_ptr& error);

private:
  using Submission = std::variant<std::unique_ptr<Collective>, P2pEngine::Request>;

  void record_call(Collective& collective, WorkState state);
  void record_call(P2pEngine::Request& request);
  bool advance_collective();
  bool send_ahead();

  Group& group_;
  std::vector<std::shared_ptr<Work>> completed_;  // by source and one more, each asked for when first needed
  P2pEngine p2p_;
  std::deque<std::unique_ptr<Collective>> queue_;  // the front one runs
  bool front_started_ = false;
  bool is_settling_ = false;
  OwedHeaders owed_;
  Collective* ahead_ = nullptr;  // the last one of the queue that was sent of before its turn
  bool may_send_ahead_ = true;
  Touched touched_;                 // by those before it
  Clock::time_point last_end_{};    // of a collective
  QuickClock clock_;                // of short calls
  std::vector<Submission> taking_;  // what take_new has not got to, where that threw
  std::shared_ptr<Work> misfit_;    // what take_new threw about

  mutable std::mutex mutex_;  // protects what follows
  std::vector<Submission> new_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_p2p_ = 0;
  bool is_closed_ = false;
  std::atomic<bool> has_new_{false};
  std::atomic<int> taken_{0};  // by the driver, and not finished
};

}  // namespace holmes
