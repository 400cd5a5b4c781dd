// RdmaChannel: a byte stream over RDMA. Each side writes into a ring in the other's registered memory and learns from
// it what has been taken. The bytes of a message are copied into a ring and out of one; the HCA does the rest. Much of
// what lasts (see Channel) is offered to the peer instead, whose HCA reads it into where it is to be: the stream goes
// on once the peer has answered how much of that it has read. Both sides register such memory for that time only: what
// is unmapped afterwards is known to no HCA. What lasts and is registered anyhow (see BufferRegions) is lent where it
// is less: the HCA sends it from where it is into the peer's ring.
//
// Over several ports there is a lane each. The stream goes over the first one that lives, reads over all: the next
// piece on the lane that will have it first, as with rails over TCP. A lane is lost when its HCA gives up a request,
// its port is down, or the peer says so. Both sides stop it, take up what has come by it, and tell each other how far
// that is (RdmaState); from there each goes on over the next lane. What a stopped lane's packets still bring is not
// taken, so nothing comes twice. The last lane that is lost ends the stream.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/connection.hpp"
#include "holmes/transport/rails_context.hpp"
#include "holmes/transport/rdma/rdma_lane.hpp"

namespace holmes {

class RdmaChannel final : public Channel {
public:
  // `pairs`, connected, with the same rings, in the same order on both sides. `sockets`: the TCP connections over which
  // that was arranged; their end tells that the peer's process has ended.
  RdmaChannel(int peer, std::vector<std::unique_ptr<RdmaQueuePair>> pairs, std::vector<Connection> sockets,
              std::shared_ptr<RailsContext> context);
  // Waits until what was sent has arrived, two seconds after shutdown() at most: an HCA forgets what its process
  // leaves.
  ~RdmaChannel() override;

  // At set-up: asks every path for an acknowledgement.
  void start_proof();
  // Nothing where all came; else of one that did not yet. Throws UnreachableError where an HCA gave up.
  const ConnectionInfo* look_for_proof();
  // Its lanes' paths (RdmaQueuePair::path_to): all; those whose HCA gave up for want of an answer, and, where the time
  // for one `is_over`, those that have none.
  std::vector<std::string> paths() const;
  std::vector<std::string> silent_paths(bool is_over) const;
  // The TCP connections, for who goes on without it.
  std::vector<Connection> take_sockets() { return std::exchange(sockets_, {}); }

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  std::size_t lasting_bytes() const override { return direct_bytes_; }
  std::size_t try_send_lasting(std::span<const iovec> pieces) override;
  std::size_t try_recv_lasting(iovec piece) override;
  std::size_t try_send_staged(std::span<const iovec> pieces) override;
  bool takes_device_memory(int gpu) const override;
  DeviceMove try_send_device(iovec memory, int gpu) override;
  DeviceMove try_recv_device(iovec memory, int gpu) override;
  std::size_t lead_bytes() override { return rings_.bytes() / 2; }
  std::size_t max_peek_bytes() const override { return rings_.bytes() / 2; }
  const std::byte* try_peek(std::size_t bytes) override;
  void consume(std::size_t bytes) override;
  bool is_unanswered() const override { return is_unanswered_; }
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void finish_wait(Clock::time_point now, std::span<const pollfd> asked) override;
  bool needs_maintenance() const override { return true; }
  std::optional<Clock::time_point> next_maintenance(Clock::time_point now) override;
  void maintain(Clock::time_point now) override;
  // Where an offer, a read or what was lent is under way only the driver may call it: its memory is left alone when
  // this returns.
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

  // Descriptors that a forked child must not keep open.
  std::vector<int> descriptors() const;
  // What is readable when something has come.
  void append_waits(std::vector<pollfd>& fds) const;

private:
  // What an immediate value says: what kind of message it is and, of data and answers to offers, how many bytes; of a
  // state, which one.
  enum class Kind : std::uint32_t { data = 0, credit = 1, end = 2, offer = 3, answer = 4, state = 5 };
  static constexpr std::uint32_t kind_shift = 29;
  static std::uint32_t immediate(Kind kind, std::size_t bytes = 0) {
    return static_cast<std::uint32_t>(kind) << kind_shift | static_cast<std::uint32_t>(bytes);
  }
  using Regions = std::vector<SharedRegion>;  // by lane; null: it is lost
  // Memory of this side's user that the peer may read.
  struct Offered {
    iovec memory;
    Regions regions;
    std::optional<std::size_t> answer;
  };
  // Memory of this side's user that goes into the peer's ring from where it is, up to position `end` of the stream.
  struct Lent {
    iovec memory;
    SharedRegion region;
    std::uint64_t end;
    bool is_copied = false;  // into this side's ring, as a lane was lost
  };
  // What is being read of the peer's offer.
  struct Pull {
    iovec memory;
    Regions regions;
    std::size_t piece_bytes = 0;
    std::size_t asked_bytes = 0;   // from the begin on
    std::deque<RdmaRead> again{};  // that lost lanes leave
    std::size_t read_bytes = 0;
    bool is_answered = false;  // by what follows the last read
    bool is_asked() const { return asked_bytes == memory.iov_len && again.empty(); }
    bool is_done() const { return read_bytes == memory.iov_len; }
  };
  // Ids of sends that are not counted.
  static constexpr std::uint64_t end_id = UINT64_MAX;

  RdmaLane& main() const { return *lanes_[main_.load(std::memory_order_relaxed)]; }
  // Where requests of this lane leave the stream.
  std::uint64_t position_on(const RdmaLane& lane) const { return &lane == &main() && !is_stalled_ ? posted_to_ : 0; }

  // --- sending ---
  std::size_t readable_bytes() const { return arrived_bytes_ - consumed_bytes_; }
  // Nothing that a lost lane had waits to be sent again.
  bool is_ready() const { return !is_behind_.load(std::memory_order_relaxed); }
  // After `more` other messages.
  std::size_t sendable_bytes(std::uint64_t more = 0) const;
  // `is_followed`: by what wakes the peer.
  std::size_t send(std::span<const iovec> pieces, bool is_followed);
  std::size_t send_messages(std::span<const iovec> pieces, std::size_t skip, std::size_t most, bool is_followed);
  using Writes = std::array<RdmaQueuePair::Write, RdmaQueuePair::most_at_once>;
  void post_messages(Writes& writes, std::size_t count);
  std::size_t send_lent(std::span<const iovec> pieces);
  std::size_t take_lent();
  bool has_gone(const Lent& lent) const { return lent.is_copied || completed_to_ >= lent.end; }
  void copy_lent();
  RdmaQueuePair::Write fill_message(std::span<const iovec> pieces, std::size_t skip, std::size_t most,
                                    bool is_followed);
  RdmaQueuePair::Write next_message(std::size_t bytes);
  int post(RdmaQueuePair::Write write) { return main().post(write, posted_to_); }
  void fail_post(RdmaLane& lane, int error);
  std::size_t send_offered(std::span<const iovec> pieces);
  std::size_t send_unoffered(std::span<const iovec> pieces);
  std::optional<std::size_t> take_answer();
  bool is_staging(const iovec& piece) const;
  void offer(const iovec& piece, std::optional<int> gpu = {});
  int post_offer();
  void post_held();
  void post_end();

  // --- receiving ---
  void start_pull(const iovec& piece, std::optional<int> gpu = {});
  std::size_t take_pull();
  void ask_for_pull();
  std::optional<RdmaRead> next_read() const;
  bool can_ask() const {
    return std::ranges::any_of(lanes_, [](const auto& lane) { return lane->is_living() && lane->has_room(); });
  }
  void take_reads(RdmaLane& lane, std::optional<Clock::time_point> now);
  bool answers_with_last_read() const;
  void answer();
  void give_answer();
  RdmaQueuePair::Write answer_message(std::size_t bytes);
  void count_answer(std::size_t bytes);
  void take_up(RdmaLane& lane, std::uint32_t told);
  Regions register_memory(const iovec& memory, int access, std::optional<int> gpu) const;
  // The HCAs leave the user's memory alone.
  void let_go();
  void look_for_receives();
  void look_for_receives(RdmaLane& lane);
  void look_for_sends();
  void look_for_sends(RdmaLane& lane);
  bool is_credit_due(std::size_t part) const;
  void give_credit();
  RdmaQueuePair::Write credit_message(RdmaCredit& credit) const;
  void count_credit(const RdmaCredit& credit);
  void post_credit();

  // --- losses ---
  void lose(RdmaLane& lane, int error, const std::string& why);
  void lose(RdmaLane& lane, const verbs::WorkCompletion& completion);
  bool take_state(std::size_t lost);
  void catch_up();
  void tell_state();
  void go_on();
  void send_again();
  bool is_settled() const { return is_ready() && !is_state_due_; }
  void look_at_ports(Clock::time_point now);
  void look_for_trouble(Clock::time_point now);
  void fail(int error, const RdmaLane& lane, const std::string& why);
  void throw_if_ended();
  [[noreturn]] void throw_senseless() const;
  bool has_peer_left();
  void linger();
  std::optional<Clock::time_point> clock() const;

  std::vector<Connection> sockets_;
  std::vector<bool> lost_sockets_;  // whose NIC failed, or the peer has ended
  std::shared_ptr<RailsContext> context_;
  std::vector<std::unique_ptr<RdmaLane>> lanes_;
  RdmaRings& rings_;
  std::uint64_t epoch_;
  bool is_proven_ = false;
  const RdmaLane* failed_ = nullptr;  // the last one

  // Sending. Positions in the stream: what was taken from who sends, what is posted on the lane that it goes over (as
  // much, but after a loss), what is complete.
  std::uint64_t sent_to_ = 0;
  std::uint64_t posted_to_ = 0;
  std::uint64_t completed_to_ = 0;
  std::uint64_t woken_to_ = 0;  // up to which a sleeping peer is woken
  std::uint64_t credit_bytes_ = 0;
  std::uint64_t credits_ = 0;  // that came
  bool is_end_complete_ = false;

  // Receiving.
  std::uint64_t arrived_bytes_ = 0;
  std::uint64_t consumed_bytes_ = 0;
  std::uint64_t seen_bytes_ = 0;  // arrived before who receives asked last
  std::uint64_t given_bytes_ = 0;
  bool has_ended_ = false;  // the peer shut down; nothing follows

  // Past the rings: one offer at a time each way; it is read in as many pieces as who receives asks for.
  const std::size_t direct_bytes_;  // from so many on
  std::optional<Offered> offered_;
  std::optional<Lent> lent_;
  std::optional<RdmaQueuePair::Write> held_;  // what is posted with the offer after it, and counts as posted
  std::size_t refused_bytes_ = 0;             // what was left of an offer; they go by the ring
  std::optional<RdmaOffer> offer_;            // the peer's, which is not answered
  std::size_t pulled_bytes_ = 0;              // of it
  bool is_offer_new_ = false;                 // since the last wait
  std::optional<Pull> pull_;
  std::optional<std::size_t> owed_answer_;

  // Losses.
  std::atomic<std::size_t> main_{0};  // the lane that the stream goes over
  std::uint64_t lost_ = 0;            // lanes, as RdmaState
  RdmaState peer_state_;
  bool is_state_due_ = false;
  bool is_stalled_ = false;             // until the peer has told what it had by a lost lane
  std::atomic<bool> is_behind_{false};  // and that was sent again
  bool is_offer_due_ = false;
  std::uint64_t sent_offers_ = 0;
  std::uint64_t sent_answers_ = 0;
  std::size_t last_answer_ = 0;
  std::uint64_t arrived_offers_ = 0;
  std::uint64_t arrived_answers_ = 0;

  // Waiting.
  struct Progress {
    std::uint64_t arrived = 0;
    std::uint64_t completed = 0;
    std::uint64_t credits = 0;
    bool operator==(const Progress&) const = default;
  };
  Progress progress() const;
  bool has_come(bool for_recv, bool for_send);
  Progress waited_;
  bool is_waiting_ = false;
  std::size_t first_wait_ = 0;  // where its descriptors are among all, and how many they are
  std::size_t waits_ = 0;
  std::optional<Clock::time_point> look_at_;  // absent: as soon after the next look at the clock as ever
  Clock::time_point look_at_ports_at_{};
  bool is_unanswered_ = false;

  int error_ = 0;
  bool is_closed_by_peer_ = false;  // its TCP connection has ended
  std::atomic<bool> is_shut_down_{false};
  std::atomic<Clock::time_point> shut_down_at_{};
};

}  // namespace holmes
