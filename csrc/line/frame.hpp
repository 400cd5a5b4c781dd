// Frames as a packet socket with PACKET_VNET_HDR has them: a virtio_net_hdr, then Ethernet. One frame may be many
// packets of a wire: what TCP or UDP left to the network card to cut (GSO).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace holmes::line {

using Bytes = std::span<const std::uint8_t>;

// virtio_net_hdr, in this machine's byte order. Ours, as <linux/virtio_net.h> is not C++ in all versions.
struct Offload {
  std::uint8_t flags, gso_type;
  std::uint16_t header_bytes, gso_size, csum_start, csum_offset;
};
static_assert(sizeof(Offload) == 10);

// How a frame is made of packets.
class Layout {
public:
  // Of any bytes. What is not understood counts as one packet, and stays whole.
  explicit Layout(Bytes frame);

  std::size_t packets() const { return packets_; }

  // The packets [first, first + count) of the frame as a frame of their own, as the sender would have made it. All of
  // them: the frame itself.
  std::vector<std::uint8_t> cut(Bytes frame, std::size_t first, std::size_t count) const;

private:
  bool find_headers(Bytes frame);

  std::size_t packets_ = 1;
  std::size_t transport_ = 0;  // where TCP's or UDP's header begins in the frame
  std::size_t payload_ = 0;    // and where what it carries does
  std::size_t packet_payload_ = 0;
  bool is_ipv6_ = false;
  bool is_tcp_ = false;
};

}  // namespace holmes::line
