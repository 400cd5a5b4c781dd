// RailsChannel: one byte stream striped over several TCP connections, each bound to its own NIC.
#pragma once

#include "holmes/transport/channel.hpp"

namespace holmes {

// The stream travels in chunks, each with its position in front. The next chunk goes to the rail that will have
// delivered it first, by the rate the kernel measures and what is queued there: rails of different speed carry shares
// in proportion. The receiver takes chunks in order; what comes early waits in its rail's socket.
class RailsChannel final : public Channel {
public:
  RailsChannel(int peer, std::vector<MeshSocket> sockets);

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  struct ChunkHeader {
    std::uint64_t begin = 0;  // position of the chunk in the stream
    std::uint64_t bytes = 0;
  };
  // One direction of a rail: the chunk in progress.
  struct Progress {
    ChunkHeader header;
    std::size_t header_bytes = 0;   // of the header, so far
    std::size_t payload_bytes = 0;  // of the payload, so far
    bool is_idle() const { return header_bytes == 0; }
    std::uint64_t position() const { return header.begin + payload_bytes; }
  };
  struct Rail {
    explicit Rail(MeshSocket socket) : socket(std::move(socket)) {}
    MeshSocket socket;
    Progress out;
    Progress in;
    bool is_full = false;    // took less than it was offered
    bool has_ended = false;  // the peer closed it; other rails may still hold the last bytes
    std::atomic<std::uint64_t> sent_bytes{0};
    std::atomic<std::uint64_t> received_bytes{0};
  };

  Rail* choose_rail(std::size_t bytes) const;
  bool send_chunk(Rail& rail, std::span<const iovec> pieces, std::uint64_t end);
  bool recv_header(Rail& rail);
  bool recv_payload(Rail& rail, std::span<const iovec> pieces, std::size_t offered_bytes);

  std::vector<std::unique_ptr<Rail>> rails_;
  std::uint64_t sent_position_ = 0;      // everything before it was taken by the system
  std::uint64_t assigned_position_ = 0;  // everything before it belongs to a rail
  std::uint64_t received_position_ = 0;
};

}  // namespace holmes
