// CheckedChannel: a byte stream whose bytes are compared with what was sent, by CRC32C.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/stage.hpp"

namespace holmes {

// In front of each frame of the stream, in host byte order (little-endian machines only; checked by the handshake). A
// cache line long, so that what follows in a shared-memory ring stays aligned.
struct alignas(64) CheckedHeader {
  static constexpr std::uint32_t right_magic = 0x43324348;  // "HC2C"
  std::uint32_t magic = right_magic;
  std::uint32_t bytes = 0;     // of payload
  std::uint64_t sequence = 0;  // of the frame
  std::uint32_t payload_crc = 0;
  std::uint8_t unused[40] = {};
  std::uint32_t header_crc = 0;  // of all before it
};
static_assert(sizeof(CheckedHeader) == 64);

// Over another channel, on both sides. The last byte of a frame is given on only when the whole frame is as it was
// sent; before it, bytes may be in use that are not: no operation ends with them. What is offered must stay the same
// until it was taken, so it always keeps pace: where the inner channel changes its way, less would be. Throws
// IntegrityError, naming `own_place` ("rank 0 (host a)"), the peer by `peer_label`, its host and the NIC.
class CheckedChannel final : public Channel {
public:
  CheckedChannel(std::unique_ptr<Channel> inner, std::string communicator, std::string own_place, int peer_label);

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  std::size_t lead_bytes() override { return inner_->lead_bytes(); }
  std::size_t max_peek_bytes() const override { return inner_->max_peek_bytes(); }
  // A part of one frame stays where the inner channel has it, once the whole frame was compared there.
  const std::byte* try_peek(std::size_t bytes) override;
  void consume(std::size_t bytes) override;
  bool tells_end() const override { return inner_->tells_end(); }
  bool is_unanswered() const override { return inner_->is_unanswered(); }
  void set_low_water(std::size_t bytes) override { inner_->set_low_water(bytes); }
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override {
    return inner_->prepare_wait(for_recv, for_send, fds);
  }
  void finish_wait(Clock::time_point now, std::span<const pollfd> asked) override { inner_->finish_wait(now, asked); }
  void set_receives_meanwhile(bool receives) override { inner_->set_receives_meanwhile(receives); }
  std::optional<Clock::time_point> next_look() const override { return inner_->next_look(); }
  bool needs_maintenance() const override { return inner_->needs_maintenance(); }
  std::optional<Clock::time_point> next_maintenance(Clock::time_point now) override {
    return inner_->next_maintenance(now);
  }
  void maintain(Clock::time_point now) override { inner_->maintain(now); }
  void shutdown() override { inner_->shutdown(); }
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  void begin_frame(std::span<const iovec> pieces);
  std::size_t frame_bytes(std::span<const iovec> pieces);
  bool has_header();
  std::size_t recv_frame(std::span<const iovec> pieces);
  bool compare_in_place();
  void end_frame(const CheckedHeader& next, std::size_t next_bytes);
  void check_header() const;
  void check_payload() const;
  [[noreturn]] void throw_changed(const std::string& what) const;

  std::unique_ptr<Channel> inner_;
  std::string communicator_;
  std::string own_place_;
  int peer_label_;

  std::size_t most_bytes_;  // of a frame's payload
  // The frame that leaves: how much of header and payload is gone. All: the next one begins.
  CheckedHeader out_;
  std::size_t out_header_bytes_ = sizeof(CheckedHeader);
  std::size_t out_payload_bytes_ = 0;
  std::size_t out_since_header_ = 0;  // bytes behind the last piece that had a frame of its own
  // The frame that arrives.
  CheckedHeader in_;
  std::size_t in_header_bytes_ = 0;
  std::size_t in_payload_bytes_ = 0;
  std::uint32_t in_crc_ = 0;
  bool is_compared_ = false;  // in place, before all of it is taken
  std::uint64_t in_sequence_ = 0;
  Stage stage_;              // what was peeked at over more than one frame
  std::vector<iovec> list_;  // of the call that is made
};

}  // namespace holmes
