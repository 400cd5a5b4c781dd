// TcpChannel: a byte stream over one TCP connection that is bound to a NIC.
#pragma once

#include <memory>
#include <vector>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/connection.hpp"

namespace holmes {

class TcpChannel final : public Channel {
public:
  TcpChannel(int peer, Connection socket) : Channel(peer), socket_(std::move(socket)) {}

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_send_later(std::span<const iovec> pieces) override;
  bool keeps_any() const override { return !kept_.empty(); }
  void send_kept() override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  // What has to be looked after, or encrypted, costs more than the short way saves.
  bool takes_short(std::size_t in_a_row) const override {
    return in_a_row <= 1 && !socket_.tls && !needs_maintenance();
  }
  std::size_t short_room_bytes() override { return takes_short(1) ? SIZE_MAX : 0; }
  std::size_t send_short(std::span<const iovec> pieces, bool later) override;
  ShortView view_short(std::size_t wanted) override;
  void consume(std::size_t bytes) override;
  std::size_t lead_bytes() override;
  bool is_unanswered() const override;
  void set_low_water(std::size_t bytes) override;
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void finish_wait(Clock::time_point /*now*/, std::span<const pollfd> /*asked*/) override { awaits_send_ = false; }
  bool needs_maintenance() const override { return socket_.pacer || socket_.watch; }
  std::optional<Clock::time_point> next_maintenance(Clock::time_point now) override;
  void maintain(Clock::time_point now) override;
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  std::size_t send_now(std::span<const iovec> pieces);
  std::size_t take_ahead(std::span<const iovec> pieces);
  ssize_t read_ahead();

  Connection socket_;
  std::vector<std::byte> kept_;  // goes before all that is sent from now on
  unsigned kept_count_ = 0;      // messages of these, or more
  // What came with the last small piece: a peer that does not wait for this rank has sent several of them by then.
  std::unique_ptr<std::byte[]> ahead_;
  std::size_t ahead_begin_ = 0;
  std::size_t ahead_end_ = 0;
  int low_water_bytes_ = 1;
  std::size_t lead_bytes_ = 0;       // 0: the path was not asked yet
  std::uint64_t lead_asked_at_ = 0;  // in bytes sent
  bool awaits_send_ = false;
};

}  // namespace holmes
