// RailsChannel: one byte stream striped over several TCP connections, each bound to its own NIC.
#pragma once

#include "holmes/transport/channel.hpp"
#include "holmes/transport/rail.hpp"
#include "holmes/transport/rail_frame.hpp"
#include "holmes/transport/rails_context.hpp"

namespace holmes {

// The stream travels in numbered chunks. The next chunk goes to the rail that will have delivered it first, by the rate
// at which its chunks are acknowledged: rails of different speed carry shares in proportion. The receiver takes chunks
// in order; what comes early waits in memory, so that every rail flows.
//
// A rail is lost when its connection fails while others live, when its interface is down, or when the peer acknowledges
// nothing for the context's timeout. The side that notices tells the other; both send the rail's unacknowledged chunks
// again on the others (what comes twice is dropped), say so in the log, and go on. The last rail is never given up:
// when it ends, so does the stream.
//
// Over one far path there may be rails in reserve (Connection::is_reserve). Where lost packets make windows small
// (Rail::heeds_loss) all are used from the beginning. Else four times as many from when the buffers of those in use are
// the limit, or these are lost; before that the stream goes as over one connection.
class RailsChannel final : public Channel {
public:
  RailsChannel(int peer, std::vector<Connection> sockets, std::shared_ptr<RailsContext> context);

  // Bytes count as sent when they are in a rail's socket. Until then the caller must offer the same ones again.
  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  std::size_t lead_bytes() override;
  bool tells_end() const override;
  bool is_unanswered() const override;
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void finish_wait(Clock::time_point /*now*/, std::span<const pollfd> /*asked*/) override {
    awaits_recv_ = awaits_send_ = false;
  }
  bool needs_maintenance() const override { return true; }
  std::optional<Clock::time_point> next_maintenance(Clock::time_point now) override;
  void maintain(Clock::time_point now) override;
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  // Where received bytes go: what is left of the caller's pieces.
  class Sink;

  // --- sending ---
  void assign(std::span<const iovec> pieces, std::uint64_t end, Clock::time_point now);
  std::span<const std::unique_ptr<Rail>> used() const { return std::span(rails_).first(used_count_); }
  Rail* choose_rail(std::size_t bytes) const;
  Rail* find_idle_rail(const Rail& chosen, Clock::time_point now) const;
  bool is_window_open();
  std::uint64_t first_unwritten() const;

  void copy_late(Clock::time_point now);
  Rail* find_faster(const Rail& slow, std::size_t bytes, double limit_s) const;

  void limit_unsent();
  void use_reserves();
  void tell_reserves(std::size_t before) const;

  // --- receiving ---
  bool deliver(Sink& sink);
  bool receive(Rail& rail, Sink& sink);
  void check_crc(Rail& rail) const;
  void check_header(const FrameHeader& header) const;
  bool receive_due(Rail& rail, Sink& sink);
  bool receive_early(Rail& rail);
  bool discard(Rail& rail, std::size_t bytes);
  void finish_due();

  // --- losses ---
  bool has_living(const Rail* except = nullptr) const;
  [[noreturn]] void throw_closed() const;
  void check_health(Clock::time_point now);
  bool is_outlived(const Rail& rail) const;
  void retire(Rail& rail, const std::string& reason, bool tell_peer, Clock::time_point now);
  void send_again(Clock::time_point now);
  void warn_of(const Rail& rail, const std::string& reason, std::size_t chunks) const;

  std::shared_ptr<RailsContext> context_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::size_t used_count_;  // the first ones; what follows is in reserve
  bool shares_path_;        // with its reserves: what cuts one connection's path cuts that of all
  FramePool pool_;

  std::uint64_t sent_position_ = 0;      // of the stream: everything before it is in a socket
  std::uint64_t assigned_position_ = 0;  // everything before it was given to a rail
  std::uint64_t next_sequence_ = 0;
  std::uint64_t oldest_sequence_ = 0;  // at least everything before it was acknowledged
  ChunkQueue again_;                   // of lost rails, to be sent on others
  Clock::time_point copies_at_{};      // when to look again for chunks that are late
  bool awaits_send_ = false;

  ReorderBuffer received_;
  std::size_t delivered_bytes_ = 0;  // of the chunk that is due
  std::size_t due_bytes_ = 0;        // its length, once part of it was delivered
  std::vector<std::byte> scratch_;   // for what came twice
  Clock::time_point received_at_;
  bool awaits_recv_ = false;

  Clock::time_point health_check_at_;
};

}  // namespace holmes
