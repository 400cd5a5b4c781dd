// RdmaChannel: a byte stream over RDMA. Each side writes into a ring in the other's registered memory and learns from
// it what has been taken. The bytes of a message are copied into a ring and out of one; the HCA does the rest. Much of
// what lasts (see Channel) is offered to the peer instead, whose HCA reads it into where it is to be: the stream goes
// on once the peer has answered how much of that it has read. Both sides register such memory for that time only: what
// is unmapped afterwards is known to no HCA.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/connection.hpp"
#include "holmes/transport/rdma/queue_pair.hpp"

namespace holmes {

class RdmaChannel final : public Channel {
public:
  // `pair` is connected. `socket`: the TCP connection over which that was arranged; its end tells that the peer's
  // process has ended.
  RdmaChannel(int peer, std::unique_ptr<RdmaQueuePair> pair, Connection socket);
  // Waits until what was sent has arrived, two seconds after shutdown() at most: an HCA forgets what its process
  // leaves.
  ~RdmaChannel() override;

  // At set-up: asks the path for an acknowledgement.
  void start_proof();
  // Whether it came. Throws UnreachableError where the HCA gave up.
  bool is_proven();

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  std::size_t lasting_bytes() const override { return direct_bytes_; }
  std::size_t try_send_lasting(std::span<const iovec> pieces) override;
  std::size_t try_recv_lasting(iovec piece) override;
  std::size_t lead_bytes() override { return pair_->ring_bytes() / 2; }
  std::size_t max_peek_bytes() const override { return pair_->ring_bytes() / 2; }
  const std::byte* try_peek(std::size_t bytes) override;
  void consume(std::size_t bytes) override;
  bool is_unanswered() const override { return is_unanswered_; }
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void finish_wait() override;
  bool needs_maintenance() const override { return true; }
  std::optional<Clock::time_point> next_maintenance(Clock::time_point now) override;
  void maintain(Clock::time_point now) override;
  // Where an offer or a read is under way only the driver may call it: its memory is left alone when this returns.
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

  // Descriptors that a forked child must not keep open.
  std::vector<int> descriptors() const;
  int fd() const { return pair_->fd(); }

private:
  // What an immediate value says: what kind of message it is and, of data and answers to offers, how many bytes.
  enum class Kind : std::uint32_t { data = 0, credit = 1, end = 2, offer = 3, answer = 4 };
  static constexpr std::uint32_t kind_shift = 29;
  static std::uint32_t immediate(Kind kind, std::size_t bytes = 0) {
    return static_cast<std::uint32_t>(kind) << kind_shift | static_cast<std::uint32_t>(bytes);
  }
  // Memory of this side's user that the peer may read.
  struct Offered {
    iovec memory;
    SharedRegion region;
    std::optional<std::size_t> answer;
  };
  // What is being read of the peer's offer.
  struct Pull {
    iovec memory;
    SharedRegion region;
    std::size_t asked_bytes = 0;
    std::uint64_t last_id = 0;
    bool is_done = false;
    bool is_asked() const { return asked_bytes == memory.iov_len; }
  };
  // Ids of sends that are not counted.
  static constexpr std::uint64_t end_id = UINT64_MAX;

  std::size_t readable_bytes() const { return arrived_bytes_ - consumed_bytes_; }
  // After `more` other messages.
  std::size_t sendable_bytes(std::uint64_t more = 0) const;
  // `is_followed`: by what wakes the peer.
  std::size_t send(std::span<const iovec> pieces, bool is_followed);
  std::size_t send_messages(std::span<const iovec> pieces, std::size_t skip, std::size_t most, bool is_followed);
  RdmaQueuePair::Write fill_message(std::span<const iovec> pieces, std::size_t skip, std::size_t most,
                                    bool is_followed);
  int post(RdmaQueuePair::Write write);
  bool is_signal_due() const;
  void count_request(bool is_signaled);
  bool has_request() const { return posted_ - completed_ < RdmaQueuePair::data_send_depth; }
  void fail_post(int error);
  void offer(const iovec& piece);
  void start_pull(const iovec& piece);
  void ask_for_pull();
  void answer();
  void give_answer();
  void take_up(std::uint32_t told);
  SharedRegion register_memory(const iovec& memory, int access) const;
  // The HCA leaves the user's memory alone.
  void let_go();
  void look_for_receives();
  void look_for_sends();
  void give_credit();
  void fail(const verbs::WorkCompletion& completion);
  void fail(int error, const std::string& why);
  void throw_if_ended();
  bool has_peer_left();
  void linger();

  std::unique_ptr<RdmaQueuePair> pair_;
  Connection socket_;
  std::uint64_t epoch_;

  // Sending. Requests are counted; each remembers where in the stream it ends.
  std::uint64_t sent_to_ = 0;  // position in the stream
  std::uint64_t posted_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t signaled_to_ = 0;      // requests, the last of which is signaled
  std::uint64_t completed_to_ = 0;     // position
  std::uint64_t unsignaled_from_ = 0;  // position
  std::vector<std::uint64_t> ends_;    // by request
  std::uint64_t data_messages_ = 0;
  std::uint64_t woken_to_ = 0;  // position up to which a sleeping peer is woken
  RdmaCredit credit_;
  bool is_end_complete_ = false;

  // Receiving.
  std::uint64_t arrived_bytes_ = 0;
  std::uint64_t consumed_bytes_ = 0;
  std::uint64_t seen_bytes_ = 0;  // arrived before who receives asked last
  std::uint64_t arrived_messages_ = 0;
  RdmaCredit given_;
  bool has_ended_ = false;  // the peer shut down; nothing follows

  // Past the rings: one offer at a time each way; it is read in as many pieces as who receives asks for.
  const std::size_t direct_bytes_;  // from so many on
  std::optional<Offered> offered_;
  std::size_t refused_bytes_ = 0;   // what was left of an offer; they go by the ring
  std::optional<RdmaOffer> offer_;  // the peer's, which is not answered
  std::size_t pulled_bytes_ = 0;    // of it
  bool is_offer_new_ = false;       // since the last wait
  std::optional<Pull> pull_;
  std::optional<std::size_t> owed_answer_;

  // Waiting.
  struct Progress {
    std::uint64_t arrived = 0;
    std::uint64_t completed = 0;
    std::uint64_t credit = 0;
    bool operator==(const Progress&) const = default;
  };
  Progress progress() const { return {arrived_bytes_, completed_, credit_.bytes}; }
  Progress waited_;
  bool is_waiting_ = false;
  std::optional<Clock::time_point> look_at_;  // absent: as soon after the next look at the clock as ever
  std::optional<std::uint64_t> asked_;        // the request whose acknowledgement shows that the path lives
  bool is_unanswered_ = false;
  int inactive_looks_ = 0;

  int error_ = 0;
  bool is_closed_by_peer_ = false;  // its TCP connection has ended
  std::atomic<bool> is_shut_down_{false};
  std::atomic<Clock::time_point> shut_down_at_{};
};

}  // namespace holmes
