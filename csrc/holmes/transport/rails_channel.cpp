#include "holmes/transport/rails_channel.hpp"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// A chunk: long enough that its header and system call cost nothing, short enough that the slowest rail's last one is
// not waited for.
constexpr std::size_t chunk_bytes = 64 * 1024;
// Bytes a rail may hold that it has not sent yet. More would tie work to a rail before its speed is known.
constexpr int unsent_limit_bytes = 4 * chunk_bytes;
// A rail that has room is taken where it delivers at most this much later than the best one: measured rates waver.
constexpr double lateness_allowed = 1.2;
constexpr std::size_t max_pieces = 8;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

// The parts of `pieces` from `skip` on, `bytes` long at most, appended to `selected` at `count`.
std::size_t select(std::span<const iovec> pieces, std::size_t skip, std::size_t bytes,
                   std::array<iovec, max_pieces>& selected, std::size_t count) {
  for (const iovec& piece : pieces) {
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    if (bytes == 0 || count == max_pieces) break;
    const std::size_t part = std::min(piece.iov_len - skip, bytes);
    selected[count++] = {static_cast<std::byte*>(piece.iov_base) + skip, part};
    bytes -= part;
    skip = 0;
  }
  return count;
}

std::size_t total_bytes(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

}  // namespace

RailsChannel::RailsChannel(int peer, std::vector<MeshSocket> sockets) : Channel(peer) {
  for (MeshSocket& socket : sockets) {
    ::setsockopt(socket.fd.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_limit_bytes, sizeof unsent_limit_bytes);
    rails_.push_back(std::make_unique<Rail>(std::move(socket)));
  }
}

std::size_t RailsChannel::try_send(std::span<const iovec> pieces) {
  const std::uint64_t end = sent_position_ + total_bytes(pieces);
  for (const auto& rail : rails_)
    if (!rail->out.is_idle()) send_chunk(*rail, pieces, end);
  while (assigned_position_ < end) {
    Rail* rail = choose_rail(std::min<std::size_t>(chunk_bytes, end - assigned_position_));
    if (!rail || !send_chunk(*rail, pieces, end)) break;
  }
  // What counts as sent ends where the first unfinished chunk stands.
  std::uint64_t position = assigned_position_;
  for (const auto& rail : rails_)
    if (!rail->out.is_idle()) position = std::min(position, rail->out.position());
  const std::size_t sent = position - sent_position_;
  sent_position_ = position;
  count_sent(sent);
  return sent;
}

// The rail on which `bytes` more would arrive first; null where that one has no room now and waiting for it is better
// than any other. A rail whose rate is not known yet counts as immediate.
RailsChannel::Rail* RailsChannel::choose_rail(std::size_t bytes) const {
  Rail* chosen = nullptr;
  double chosen_s = std::numeric_limits<double>::infinity();
  double earliest_s = std::numeric_limits<double>::infinity();
  for (const auto& rail : rails_) {
    tcp_info info{};
    socklen_t length = sizeof info;
    int queued_bytes = 0;
    ::getsockopt(rail->socket.fd.get(), IPPROTO_TCP, TCP_INFO, &info, &length);
    ::ioctl(rail->socket.fd.get(), SIOCOUTQ, &queued_bytes);
    const double rate = static_cast<double>(info.tcpi_delivery_rate);  // bytes per second
    const double arrival_s = rate > 0 ? static_cast<double>(queued_bytes + static_cast<int>(bytes)) / rate : 0;
    earliest_s = std::min(earliest_s, arrival_s);
    if (!rail->out.is_idle() || arrival_s >= chosen_s) continue;
    chosen = rail.get();
    chosen_s = arrival_s;
  }
  return chosen_s <= earliest_s * lateness_allowed ? chosen : nullptr;
}

// Goes on with the rail's chunk, or gives it the next one. Returns whether the rail took bytes and is ready for more.
bool RailsChannel::send_chunk(Rail& rail, std::span<const iovec> pieces, std::uint64_t end) {
  Progress& out = rail.out;
  if (out.is_idle() && assigned_position_ == end) return false;
  const ChunkHeader header =
      out.is_idle() ? ChunkHeader{assigned_position_, std::min<std::uint64_t>(chunk_bytes, end - assigned_position_)}
                    : out.header;
  std::array<iovec, max_pieces> selected;
  std::size_t count = 0;
  if (out.header_bytes < sizeof header)
    selected[count++] = {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(&header)) + out.header_bytes,
                         sizeof header - out.header_bytes};
  const std::uint64_t position = header.begin + out.payload_bytes;
  count = select(pieces, position - sent_position_, header.bytes - out.payload_bytes, selected, count);
  msghdr message{};
  message.msg_iov = selected.data();
  message.msg_iovlen = count;
  const ssize_t result = ::sendmsg(rail.socket.fd.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  rail.is_full = true;
  if (result < 0) {
    if (would_block(errno)) return false;
    throw StreamClosed{peer(), errno};
  }
  if (result == 0) return false;
  if (out.is_idle()) {
    out.header = header;
    assigned_position_ += header.bytes;
  }
  const std::size_t sent = static_cast<std::size_t>(result);
  const std::size_t of_header = std::min(sent, sizeof header - out.header_bytes);
  out.header_bytes += of_header;
  out.payload_bytes += sent - of_header;
  rail.sent_bytes.store(rail.sent_bytes.load(std::memory_order_relaxed) + sent, std::memory_order_relaxed);
  if (out.payload_bytes < header.bytes) return false;
  out = {};
  rail.is_full = false;
  return true;
}

std::size_t RailsChannel::try_recv(std::span<const iovec> pieces) {
  const std::uint64_t before = received_position_;
  const std::size_t offered = total_bytes(pieces);
  bool moved = true;
  while (moved && received_position_ - before < offered) {
    moved = false;
    for (const auto& rail : rails_) {
      if (!recv_header(*rail) || rail->in.position() != received_position_) continue;
      const std::size_t done = received_position_ - before;
      std::array<iovec, max_pieces> selected;
      const std::size_t count = select(pieces, done, offered - done, selected, 0);
      moved |= recv_payload(*rail, {selected.data(), count}, offered - done);
      if (received_position_ - before == offered) break;
    }
  }
  const std::size_t received = received_position_ - before;
  const auto is_over = [](const auto& rail) { return rail->has_ended; };
  if (received == 0 && offered > 0 && std::all_of(rails_.begin(), rails_.end(), is_over)) throw StreamClosed{peer(), 0};
  count_received(received);
  return received;
}

// Returns whether the rail knows its next chunk.
bool RailsChannel::recv_header(Rail& rail) {
  Progress& in = rail.in;
  if (in.header_bytes == sizeof in.header) return true;
  if (rail.has_ended) return false;
  const ssize_t result = ::recv(rail.socket.fd.get(), reinterpret_cast<std::byte*>(&in.header) + in.header_bytes,
                                sizeof in.header - in.header_bytes, MSG_DONTWAIT);
  if (result == 0) {
    rail.has_ended = true;
    return false;
  }
  if (result < 0) {
    if (would_block(errno)) return false;
    throw StreamClosed{peer(), errno};
  }
  in.header_bytes += static_cast<std::size_t>(result);
  if (in.header_bytes < sizeof in.header) return false;
  if (in.header.bytes == 0 || in.header.bytes > chunk_bytes || in.header.begin < received_position_)
    throw ProtocolError("the chunk of " + std::to_string(in.header.bytes) + " bytes at " +
                        std::to_string(in.header.begin) + " from rank " + std::to_string(peer()) +
                        " does not fit a stream that stands at " + std::to_string(received_position_));
  return true;
}

bool RailsChannel::recv_payload(Rail& rail, std::span<const iovec> pieces, std::size_t offered_bytes) {
  Progress& in = rail.in;
  std::array<iovec, max_pieces> selected;
  const std::size_t wanted = std::min<std::size_t>(in.header.bytes - in.payload_bytes, offered_bytes);
  msghdr message{};
  message.msg_iov = selected.data();
  message.msg_iovlen = select(pieces, 0, wanted, selected, 0);
  const ssize_t result = ::recvmsg(rail.socket.fd.get(), &message, MSG_DONTWAIT);
  if (result == 0) throw StreamClosed{peer(), 0};
  if (result < 0) {
    if (would_block(errno)) return false;
    throw StreamClosed{peer(), errno};
  }
  const std::size_t received = static_cast<std::size_t>(result);
  in.payload_bytes += received;
  received_position_ += received;
  rail.received_bytes.store(rail.received_bytes.load(std::memory_order_relaxed) + received, std::memory_order_relaxed);
  if (in.payload_bytes == in.header.bytes) in = {};
  return true;
}

bool RailsChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) {
  for (const auto& rail : rails_) {
    // A chunk that is not due yet would wake for nothing.
    const bool due =
        !rail->has_ended && (rail->in.header_bytes < sizeof(ChunkHeader) || rail->in.position() == received_position_);
    // Nor would a rail with room help that was passed over for a better one.
    const short events = static_cast<short>((for_recv && due ? POLLIN : 0) | (for_send && rail->is_full ? POLLOUT : 0));
    if (events) fds.push_back({rail->socket.fd.get(), events, 0});
  }
  return true;
}

void RailsChannel::shutdown() {
  for (const auto& rail : rails_) ::shutdown(rail->socket.fd.get(), SHUT_RDWR);
}

void RailsChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  for (const auto& rail : rails_) {
    infos.push_back(rail->socket.info);
    infos.back().sent_bytes = rail->sent_bytes.load(std::memory_order_relaxed);
    infos.back().received_bytes = rail->received_bytes.load(std::memory_order_relaxed);
  }
}

}  // namespace holmes
