#include "line/frame.hpp"

#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace holmes::line {

namespace {

constexpr std::size_t ethernet = sizeof(Offload);
constexpr std::size_t network = ethernet + 14;
constexpr std::size_t ipv4_header = 20, ipv6_header = 40, tcp_header = 20, udp_header = 8;
constexpr std::uint8_t gso_none = 0, gso_tcp4 = 1, gso_tcp6 = 4, gso_udp = 5, gso_ecn = 0x80;
constexpr std::uint8_t tcp_fin = 0x01, tcp_psh = 0x08, tcp_cwr = 0x80;

Offload read_offload(Bytes frame) {
  Offload header;
  std::memcpy(&header, frame.data(), sizeof header);
  return header;
}

std::uint32_t read16(const std::uint8_t* at) { return static_cast<std::uint32_t>(at[0] << 8 | at[1]); }

void write16(std::uint8_t* at, std::size_t value) {
  at[0] = static_cast<std::uint8_t>(value >> 8);
  at[1] = static_cast<std::uint8_t>(value);
}

void write32(std::uint8_t* at, std::uint32_t value) {
  write16(at, value >> 16);
  write16(at + 2, value & 0xffff);
}

// The sum of RFC 1071, folded, of an even number of bytes.
std::uint32_t sum16(const std::uint8_t* at, std::size_t bytes, std::uint64_t sum = 0) {
  for (std::size_t i = 0; i < bytes; i += 2) sum += read16(at + i);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint32_t>(sum);
}

}  // namespace

Layout::Layout(Bytes frame) {
  if (frame.size() < network || !find_headers(frame)) return;
  const std::size_t payload = frame.size() - payload_;
  packets_ = std::max<std::size_t>(1, (payload + packet_payload_ - 1) / packet_payload_);
}

bool Layout::find_headers(Bytes frame) {
  const Offload offload = read_offload(frame);
  const auto kind = static_cast<std::uint8_t>(offload.gso_type & ~gso_ecn);
  is_tcp_ = kind == gso_tcp4 || kind == gso_tcp6;
  if ((!is_tcp_ && kind != gso_udp) || offload.gso_size == 0) return false;
  const std::uint32_t type = read16(&frame[network - 2]);
  is_ipv6_ = type == 0x86dd;
  if (!is_ipv6_ && type != 0x0800) return false;
  transport_ = ethernet + offload.csum_start;
  packet_payload_ = offload.gso_size;
  const std::size_t least = is_tcp_ ? tcp_header : udp_header;
  if (transport_ < network + (is_ipv6_ ? ipv6_header : ipv4_header) || transport_ + least > frame.size()) return false;
  payload_ = transport_ + (is_tcp_ ? std::size_t{frame[transport_ + 12]} / 16 * 4 : least);
  return payload_ >= transport_ + least && payload_ < frame.size();
}

std::vector<std::uint8_t> Layout::cut(Bytes frame, std::size_t first, std::size_t count) const {
  if (count == packets_) return {frame.begin(), frame.end()};
  const std::size_t begin = payload_ + first * packet_payload_;
  const std::size_t end = std::min(frame.size(), begin + count * packet_payload_);
  std::vector<std::uint8_t> part(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(payload_));
  part.insert(part.end(), frame.begin() + static_cast<std::ptrdiff_t>(begin),
              frame.begin() + static_cast<std::ptrdiff_t>(end));

  if (count == 1) {
    Offload offload = read_offload(frame);
    offload.gso_type = gso_none;
    offload.gso_size = 0;
    std::memcpy(part.data(), &offload, sizeof offload);
  }
  std::uint8_t* const ip = &part[network];
  std::uint8_t* const transport = &part[transport_];
  const std::size_t transport_bytes = part.size() - transport_;
  // The checksum that the card will complete begins with that of the addresses, the protocol and the length.
  std::uint64_t pseudo = transport_bytes + (is_tcp_ ? IPPROTO_TCP : IPPROTO_UDP);
  if (is_ipv6_) {
    write16(ip + 4, part.size() - network - ipv6_header);
    pseudo = sum16(ip + 8, 32, pseudo);
  } else {
    write16(ip + 2, part.size() - network);
    write16(ip + 4, read16(ip + 4) + first);
    write16(ip + 10, 0);
    write16(ip + 10, ~sum16(ip, transport_ - network) & 0xffff);
    pseudo = sum16(ip + 12, 8, pseudo);
  }
  if (is_tcp_) {
    const std::uint32_t sequence = read16(transport + 4) << 16 | read16(transport + 6);
    write32(transport + 4, sequence + static_cast<std::uint32_t>(first * packet_payload_));
    // As in hardware: what the last packet says the last one says, what the first one does the first.
    if (first + count < packets_) transport[13] &= static_cast<std::uint8_t>(~(tcp_fin | tcp_psh));
    if (first > 0) transport[13] &= static_cast<std::uint8_t>(~tcp_cwr);
    write16(transport + 16, pseudo);
  } else {
    write16(transport + 4, transport_bytes);
    write16(transport + 6, pseudo);
  }
  return part;
}

}  // namespace holmes::line
