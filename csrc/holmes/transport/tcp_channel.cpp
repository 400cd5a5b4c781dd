#include "holmes/transport/tcp_channel.hpp"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <optional>

#include "holmes/core/no_memory.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// Bytes to sleep for at most. On a link of 1 Gbit/s they take half a millisecond, against 12 us for a packet.
constexpr std::size_t max_low_water_bytes = 64 * 1024;

// Several pieces that are no longer than this together are copied: that costs less than a list of them (measured, 1 KiB
// and its header: 0.12 us for sending and receiving it, 0.04 us for a look in vain).
constexpr std::size_t small_bytes = 2048;

// What a small piece is received into, with what came behind it. (Three ranks send 1 KiB to one, all on two processors:
// 13.7 us a round where each message takes a system call, 12.5 where several take one.)
constexpr std::size_t ahead_bytes = 16 * 1024;

// Kept at most until more is sent.
constexpr std::size_t most_kept_bytes = 8 * 1024;
constexpr unsigned most_kept_count = 16;

bool has_unacknowledged(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

bool is_small(std::span<const iovec> pieces) { return pieces.size() > 1 && total_bytes(pieces) <= small_bytes; }

// Calls `transfer` with a msghdr over the first max_call_bytes of `pieces`.
template <typename Transfer>
ssize_t transfer_limited(std::span<const iovec> pieces, Transfer transfer) {
  std::array<iovec, max_pieces> limited;
  std::size_t used = 0;
  std::size_t left = max_call_bytes;
  for (const iovec& piece : pieces) {
    if (left == 0 || used == max_pieces) break;
    if (piece.iov_len == 0) continue;
    limited[used] = {piece.iov_base, std::min(piece.iov_len, left)};
    left -= limited[used++].iov_len;
  }
  if (used == 0) return 0;
  msghdr message{};
  message.msg_iov = limited.data();
  message.msg_iovlen = used;
  return transfer(message);
}

// What is under way where the path is full: the rate of delivery times the shortest round trip. While less is sent than
// the path takes, the rate is that of the sending.
double path_bytes(int fd) {
  constexpr double us_per_s = 1e6;
  const auto info = tcp_info_of(fd);
  if (!info || info->tcpi_min_rtt == ~0U) return 0;
  return static_cast<double>(info->tcpi_delivery_rate) * info->tcpi_min_rtt / us_per_s;
}

}  // namespace

bool TcpChannel::is_unanswered() const { return holmes::is_unanswered(socket_.fd.get()); }

std::size_t TcpChannel::try_send(std::span<const iovec> pieces) {
  if (kept_.empty()) return send_now(pieces);
  std::array<iovec, max_pieces> all{{{kept_.data(), kept_.size()}}};
  const std::size_t count = std::min(pieces.size(), max_pieces - 1);
  std::ranges::copy(pieces.first(count), all.begin() + 1);
  const std::size_t sent = send_now({all.data(), count + 1});
  const std::size_t of_kept = std::min(sent, kept_.size());
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(of_kept));
  if (kept_.empty()) kept_count_ = 0;
  return sent - of_kept;
}

// On loopback a system call for 64 bytes takes 4 us, as it does what the peer's processor would.
std::size_t TcpChannel::try_send_later(std::span<const iovec> pieces) {
  const std::size_t bytes = total_bytes(pieces);
  if (!socket_.tls && kept_.capacity() == 0) where_memory_allows([&] { kept_.reserve(most_kept_bytes); });
  if (kept_.size() + bytes > kept_.capacity() || ++kept_count_ > most_kept_count) return try_send(pieces);
  for (const iovec& piece : pieces) {
    const auto* const from = static_cast<const std::byte*>(piece.iov_base);
    kept_.insert(kept_.end(), from, from + piece.iov_len);
  }
  return bytes;
}

void TcpChannel::send_kept() {
  try {
    try_send({});
  } catch (const StreamClosed&) {  // the next operation will say so
    kept_.clear();
  }
}

std::size_t TcpChannel::send_now(std::span<const iovec> pieces) {
  std::array<std::byte, small_bytes> together;
  iovec one{together.data(), 0};
  if (!socket_.tls && is_small(pieces)) {
    for (const iovec& piece : pieces) {
      if (piece.iov_len > 0) std::memcpy(together.data() + one.iov_len, piece.iov_base, piece.iov_len);
      one.iov_len += piece.iov_len;
    }
    pieces = {&one, 1};
  }
  const ssize_t sent = transfer_limited(pieces, [&](msghdr& message) { return socket_.send(message); });
  if (sent < 0) {
    if (would_block(errno)) return 0;
    throw StreamClosed{peer(), errno};
  }
  count_sent(static_cast<std::size_t>(sent));
  return static_cast<std::size_t>(sent);
}

// Out of what came ahead.
std::size_t TcpChannel::take_ahead(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min(piece.iov_len, ahead_end_ - ahead_begin_);
    if (bytes > 0) std::memcpy(piece.iov_base, ahead_.get() + ahead_begin_, bytes);
    ahead_begin_ += bytes;
    total += bytes;
  }
  count_received(total);
  return total;
}

// What is there, behind what came ahead.
ssize_t TcpChannel::read_ahead() {
  if (!ahead_) ahead_ = std::make_unique_for_overwrite<std::byte[]>(ahead_bytes);
  if (ahead_begin_ > 0) {
    std::memmove(ahead_.get(), ahead_.get() + ahead_begin_, ahead_end_ - ahead_begin_);
    ahead_end_ -= std::exchange(ahead_begin_, 0);
  }
  iovec ahead{ahead_.get() + ahead_end_, ahead_bytes - ahead_end_};
  msghdr message{};
  message.msg_iov = &ahead;
  message.msg_iovlen = 1;
  const ssize_t received = socket_.recv(message);
  if (received > 0) ahead_end_ += static_cast<std::size_t>(received);
  return received;
}

std::size_t TcpChannel::send_short(std::span<const iovec> pieces, bool later) {
  try {
    return later ? try_send_later(pieces) : try_send(pieces);
  } catch (const StreamClosed&) {  // try_send will say so
    return 0;
  }
}

Channel::ShortView TcpChannel::view_short(std::size_t wanted) {
  try {
    if (ahead_end_ - ahead_begin_ < wanted) read_ahead();
  } catch (const std::bad_alloc&) {
    return {.is_elsewhere = true};
  }
  return {{ahead_.get() + ahead_begin_, ahead_end_ - ahead_begin_}};
}

void TcpChannel::consume(std::size_t bytes) {
  ahead_begin_ += bytes;
  count_received(bytes);
}

std::size_t TcpChannel::try_recv(std::span<const iovec> pieces) {
  if (ahead_begin_ < ahead_end_) return take_ahead(pieces);
  const std::size_t wanted = total_bytes(pieces);
  const bool reads_ahead = !socket_.tls && wanted > 0 && wanted <= small_bytes;
  bool asked = reads_ahead;
  const ssize_t received = reads_ahead ? read_ahead() : transfer_limited(pieces, [&](msghdr& message) {
    asked = true;
    return socket_.recv(message);
  });
  if (received < 0) {
    if (would_block(errno)) return 0;
    throw StreamClosed{peer(), errno};
  }
  if (received == 0 && asked) throw StreamClosed{peer(), 0};
  if (reads_ahead) return take_ahead(pieces);
  count_received(static_cast<std::size_t>(received));
  return static_cast<std::size_t>(received);
}

std::size_t TcpChannel::lead_bytes() {
  // Paths get known while they are used, and asking takes a system call.
  constexpr std::uint64_t known_bytes = 4 * 1024 * 1024;
  if (lead_bytes_ == 0 || sent_bytes() - lead_asked_at_ >= known_bytes) {
    lead_bytes_ = std::max(min_lead_bytes, static_cast<std::size_t>(2 * path_bytes(socket_.fd.get())));
    lead_asked_at_ = sent_bytes();
  }
  return lead_bytes_;
}

void TcpChannel::set_low_water(std::size_t bytes) {
  const int wanted = static_cast<int>(std::clamp<std::size_t>(bytes, 1, max_low_water_bytes));
  // Of what is encrypted nobody knows how much lies in memory already.
  if (wanted == low_water_bytes_ || socket_.tls) return;
  // Where it is refused, the wake-up is only earlier.
  if (::setsockopt(socket_.fd.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted) == 0) low_water_bytes_ = wanted;
}

bool TcpChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) {
  const bool writes = for_send && !socket_.pauses();
  const short events = static_cast<short>((for_recv ? POLLIN : 0) | (writes ? POLLOUT : 0));
  fds.push_back({socket_.fd.get(), events, 0});
  awaits_send_ = for_send;
  return !for_recv || (ahead_begin_ == ahead_end_ && !socket_.may_hold_input());
}

// A socket whose rate is low would be ready long after it may be higher. And a path is watched for as long as it is the
// limit and a round trip longer, also where the socket has taken all and nobody waits for it.
std::optional<Clock::time_point> TcpChannel::next_maintenance(Clock::time_point now) {
  const auto paced = socket_.pacer ? socket_.pacer->next_look(awaits_send_) : std::nullopt;
  const bool is_watched = socket_.watch && has_unacknowledged(socket_.fd.get());
  return earliest({paced, is_watched ? std::optional(now + Path::look_interval) : std::nullopt});
}

void TcpChannel::maintain(Clock::time_point now) {
  if (socket_.pacer) socket_.pacer->look(now);
  if (socket_.watch) socket_.watch->look(now);
}

void TcpChannel::shutdown() { ::shutdown(socket_.fd.get(), SHUT_RDWR); }

void TcpChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  infos.push_back(socket_.current_info());
  infos.back().sent_bytes = sent_bytes();
  infos.back().received_bytes = received_bytes();
}

}  // namespace holmes
