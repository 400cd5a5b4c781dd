#include "holmes/transport/checked_channel.hpp"

#include <algorithm>

#include "holmes/core/crc32c.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

// Of a frame at most: what one system call moves, half of it here, so that it is still in the cache when it leaves.
constexpr std::size_t max_piece_bytes = 256 * 1024;
// A piece of at most so many bytes, in front of more, is an operation's header.
constexpr std::size_t max_operation_header_bytes = 256;

// Where it can be peeked at, it is to be in the ring as a whole, and another one behind it. (What is copied out of the
// sender's memory takes no room there.)
std::size_t most_payload_bytes(const Channel& channel) {
  const std::size_t peek_bytes = channel.max_peek_bytes();
  if (peek_bytes == 0 || channel.cma_use() != CmaUse::never) return max_piece_bytes;
  return std::min(max_piece_bytes, peek_bytes / 2);
}

std::uint32_t crc_of(const CheckedHeader& header) {
  return crc32c(0, reinterpret_cast<const std::byte*>(&header), offsetof(CheckedHeader, header_crc));
}

// Appends the first `bytes` of `pieces` to `list`; returns how many there were.
std::size_t append_front(std::vector<iovec>& list, std::span<const iovec> pieces, std::size_t bytes) {
  std::size_t left = bytes;
  for (const iovec& piece : pieces) {
    if (left == 0) break;
    if (piece.iov_len == 0) continue;
    list.push_back({piece.iov_base, std::min(piece.iov_len, left)});
    left -= list.back().iov_len;
  }
  return bytes - left;
}

std::uint32_t crc_of_front(std::uint32_t crc, std::span<const iovec> pieces, std::size_t bytes) {
  for (const iovec& piece : pieces) {
    const std::size_t part = std::min(piece.iov_len, bytes);
    if (part > 0) crc = crc32c(crc, static_cast<const std::byte*>(piece.iov_base), part);
    bytes -= part;
  }
  return crc;
}

iovec rest_of(CheckedHeader& header, std::size_t done_bytes) {
  return {reinterpret_cast<std::byte*>(&header) + done_bytes, sizeof header - done_bytes};
}

}  // namespace

CheckedChannel::CheckedChannel(std::unique_ptr<Channel> inner, std::string communicator, std::string own_place,
                               int peer_label)
    : Channel(inner->peer()),
      inner_(std::move(inner)),
      communicator_(std::move(communicator)),
      own_place_(std::move(own_place)),
      peer_label_(peer_label),
      most_bytes_(most_payload_bytes(*inner_)) {}

// Of the next one. Where the receiver may peek, frames end at multiples of the most that one takes behind an
// operation's header, which has one of its own where there is more than one takes: so a slice is a part of one frame.
std::size_t CheckedChannel::frame_bytes(std::span<const iovec> pieces) {
  std::size_t first = 0;
  std::size_t total = 0;
  for (const iovec& piece : pieces) {
    if (first == 0) first = piece.iov_len;
    total += piece.iov_len;
  }
  if (max_peek_bytes() == 0) return std::min(total, most_bytes_);
  const bool has_operation_header = first <= max_operation_header_bytes;
  const bool is_header_alone = has_operation_header && total > most_bytes_;
  if (has_operation_header) out_since_header_ = 0;
  const std::size_t bytes = is_header_alone ? first : std::min(total, most_bytes_ - out_since_header_ % most_bytes_);
  out_since_header_ += has_operation_header ? bytes - first : bytes;
  return bytes;
}

void CheckedChannel::begin_frame(std::span<const iovec> pieces) {
  out_.bytes = static_cast<std::uint32_t>(frame_bytes(pieces));
  out_.payload_crc = crc_of_front(0, pieces, out_.bytes);
  out_.header_crc = crc_of(out_);
  out_header_bytes_ = out_payload_bytes_ = 0;
}

std::size_t CheckedChannel::try_send(std::span<const iovec> pieces) {
  if (std::ranges::all_of(pieces, [](const iovec& piece) { return piece.iov_len == 0; })) return 0;
  if (out_header_bytes_ == sizeof out_ && out_payload_bytes_ == out_.bytes) begin_frame(pieces);
  list_.clear();
  const std::size_t header_left = sizeof out_ - out_header_bytes_;
  if (header_left > 0) list_.push_back(rest_of(out_, out_header_bytes_));
  append_front(list_, pieces, out_.bytes - out_payload_bytes_);
  const std::size_t sent = inner_->try_send(list_);
  const std::size_t of_header = std::min(sent, header_left);
  out_header_bytes_ += of_header;
  out_payload_bytes_ += sent - of_header;
  if (out_header_bytes_ == sizeof out_ && out_payload_bytes_ == out_.bytes) ++out_.sequence;
  count_sent(sent - of_header);
  return sent - of_header;
}

bool CheckedChannel::has_header() {
  if (in_header_bytes_ == sizeof in_) return true;
  const iovec rest = rest_of(in_, in_header_bytes_);
  in_header_bytes_ += inner_->try_recv({&rest, 1});
  if (in_header_bytes_ < sizeof in_) return false;
  check_header();
  return true;
}

std::size_t CheckedChannel::try_recv(std::span<const iovec> pieces) {
  const std::size_t received = stage_.bytes() > 0 ? stage_.take(pieces) : recv_frame(pieces);
  count_received(received);
  return received;
}

// Of one frame.
std::size_t CheckedChannel::recv_frame(std::span<const iovec> pieces) {
  if (!has_header()) return 0;
  list_.clear();
  const std::size_t frame_left = in_.bytes - in_payload_bytes_;
  const std::size_t wanted = append_front(list_, pieces, frame_left);
  if (wanted == 0) return 0;
  // The next header comes with the end of this frame: one call less.
  CheckedHeader next;
  if (wanted == frame_left) list_.push_back(rest_of(next, 0));
  const std::size_t received = inner_->try_recv(list_);
  const std::size_t payload = std::min(received, wanted);
  if (!is_compared_) in_crc_ = crc_of_front(in_crc_, list_, payload);
  in_payload_bytes_ += payload;
  if (in_payload_bytes_ == in_.bytes) {
    check_payload();
    end_frame(next, received - payload);
  }
  return payload;
}

const std::byte* CheckedChannel::try_peek(std::size_t bytes) {
  if (stage_.bytes() == 0) {
    if (!has_header()) return nullptr;
    const std::size_t left = in_.bytes - in_payload_bytes_;
    if (left >= bytes && left <= max_peek_bytes()) return compare_in_place() ? inner_->try_peek(bytes) : nullptr;
  }
  stage_.fill(bytes, max_peek_bytes(), [this](iovec room) { return recv_frame({&room, 1}); });
  return stage_.bytes() >= bytes ? stage_.data() : nullptr;
}

// Whether the rest of the frame is there, and as it was sent.
bool CheckedChannel::compare_in_place() {
  if (is_compared_) return true;
  const std::size_t left = in_.bytes - in_payload_bytes_;
  const std::byte* data = inner_->try_peek(left);
  if (!data) return false;
  in_crc_ = crc32c(in_crc_, data, left);
  check_payload();
  is_compared_ = true;
  return true;
}

void CheckedChannel::consume(std::size_t bytes) {
  if (stage_.bytes() > 0) {
    stage_.drop(bytes);
  } else {
    inner_->consume(bytes);
    in_payload_bytes_ += bytes;
    if (in_payload_bytes_ == in_.bytes) end_frame({}, 0);
  }
  count_received(bytes);
}

// `next_bytes` of the `next` header came with it.
void CheckedChannel::end_frame(const CheckedHeader& next, std::size_t next_bytes) {
  ++in_sequence_;
  in_ = next;
  in_header_bytes_ = next_bytes;
  in_payload_bytes_ = in_crc_ = 0;
  is_compared_ = false;
  if (in_header_bytes_ == sizeof in_) check_header();
}

void CheckedChannel::check_header() const {
  if (in_.header_crc != crc_of(in_)) throw_changed("the header of frame " + std::to_string(in_sequence_));
  if (in_.magic == CheckedHeader::right_magic && in_.sequence == in_sequence_ && in_.bytes > 0 &&
      in_.bytes <= max_piece_bytes)
    return;
  throw_changed("frame " + std::to_string(in_.sequence) + " of " + std::to_string(in_.bytes) + " bytes in place of " +
                std::to_string(in_sequence_));
}

void CheckedChannel::check_payload() const {
  if (in_crc_ != in_.payload_crc)
    throw_changed(std::to_string(in_.bytes) + " bytes (frame " + std::to_string(in_sequence_) + ")");
}

void CheckedChannel::throw_changed(const std::string& what) const {
  std::vector<ConnectionInfo> infos;
  inner_->append_info(infos);
  std::string nics;
  for (const ConnectionInfo& info : infos) {
    const std::string nic = info.transport == "shm" ? "shm" : info.interface;
    if (nics.find(nic) == std::string::npos) add_word(nics, nic, ",");
  }
  const std::string host = infos.empty() ? "" : infos.front().host;
  throw IntegrityError("communicator '" + communicator_ + "': what " + own_place_ + " received from " +
                           describe_peer(peer_label_, host, nics) + " has changed on its way: " + what +
                           " does not have the CRC32C that it was sent with" + integrity_advice,
                       {.rank = {}, .peer = peer(), .host = host, .nic = nics, .system_errno = {}});
}

void CheckedChannel::append_info(std::vector<ConnectionInfo>& infos) const { inner_->append_info(infos); }

}  // namespace holmes
