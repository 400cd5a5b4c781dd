#include "line/packet_socket.hpp"

#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <system_error>

namespace holmes::line {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::system_category(), what); }

void set(const UniqueFd& socket, int level, int option, int value, const char* what) {
  if (::setsockopt(socket.get(), level, option, &value, sizeof value) != 0) fail(what);
}

UniqueFd open_socket() {
  UniqueFd socket(::socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) fail("packet socket");
  set(socket, SOL_PACKET, PACKET_VNET_HDR, 1, "PACKET_VNET_HDR");
  return socket;
}

// `protocol` 0: nothing is received.
void bind_to(const UniqueFd& socket, const std::string& device, int protocol) {
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(static_cast<std::uint16_t>(protocol));
  address.sll_ifindex = static_cast<int>(::if_nametoindex(device.c_str()));
  if (address.sll_ifindex == 0) fail("device " + device);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) fail("bind to " + device);
}

}  // namespace

Receiver::Receiver(const std::string& device) : socket_(open_socket()) {
  set(socket_, SOL_PACKET, PACKET_VERSION, TPACKET_V2, "PACKET_VERSION");
  set(socket_, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1, "PACKET_IGNORE_OUTGOING");
  constexpr std::size_t in_a_block = 16;
  tpacket_req request{};
  request.tp_block_size = slot_bytes * in_a_block;
  request.tp_block_nr = slots / in_a_block;
  request.tp_frame_size = slot_bytes;
  request.tp_frame_nr = slots;
  if (::setsockopt(socket_.get(), SOL_PACKET, PACKET_RX_RING, &request, sizeof request) != 0) fail("PACKET_RX_RING");
  void* const ring = ::mmap(nullptr, slot_bytes * slots, PROT_READ | PROT_WRITE, MAP_SHARED, socket_.get(), 0);
  if (ring == MAP_FAILED) fail("mmap of a packet socket's ring");
  ring_ = static_cast<std::uint8_t*>(ring);
  bind_to(socket_, device, ETH_P_ALL);
}

Receiver::~Receiver() {
  if (ring_ != nullptr) ::munmap(ring_, slot_bytes * slots);
}

Bytes Receiver::front() {
  while (true) {
    const auto* const header = reinterpret_cast<tpacket2_hdr*>(slot());
    if ((__atomic_load_n(&header->tp_status, __ATOMIC_ACQUIRE) & TP_STATUS_USER) == 0) return {};
    // The offload header lies before Ethernet's.
    if (header->tp_snaplen == header->tp_len) {
      return {slot() + header->tp_mac - sizeof(Offload), header->tp_snaplen + sizeof(Offload)};
    }
    ++too_large_;
    release();
  }
}

std::chrono::nanoseconds Receiver::age() const {
  const auto* const header = reinterpret_cast<tpacket2_hdr*>(slot());
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);  // as the kernel's stamp; it may be set meanwhile
  const std::chrono::nanoseconds age =
      std::chrono::seconds(now.tv_sec - header->tp_sec) + std::chrono::nanoseconds(now.tv_nsec - header->tp_nsec);
  return std::clamp<std::chrono::nanoseconds>(age, std::chrono::nanoseconds(0), std::chrono::seconds(1));
}

void Receiver::release() {
  auto* const header = reinterpret_cast<tpacket2_hdr*>(slot());
  __atomic_store_n(&header->tp_status, TP_STATUS_KERNEL, __ATOMIC_RELEASE);
  next_ = (next_ + 1) % slots;
}

std::uint64_t Receiver::take_overflowed() {
  tpacket_stats stats{};
  socklen_t bytes = sizeof stats;
  if (::getsockopt(socket_.get(), SOL_PACKET, PACKET_STATISTICS, &stats, &bytes) != 0) return 0;
  return stats.tp_drops;
}

Sender::Sender(const std::string& device) : socket_(open_socket()) {
  // As much as an unprivileged user may: it holds what waits in the receiver's queue.
  set(socket_, SOL_SOCKET, SO_SNDBUF, 1 << 26, "SO_SNDBUF");
  bind_to(socket_, device, 0);
}

Sender::Result Sender::send(Bytes frame) {
  if (::send(socket_.get(), frame.data(), frame.size(), 0) >= 0) return Result::sent;
  const bool is_busy = errno == EAGAIN || errno == EINTR;
  return is_busy ? Result::busy : Result::refused;
}

}  // namespace holmes::line
