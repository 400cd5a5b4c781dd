#include "holmes/transport/checked_channel.hpp"

#include <algorithm>

#include "holmes/core/crc32c.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

// Of a frame at most: what one system call moves, half of it here, so that it is still in the cache when it leaves.
constexpr std::size_t max_payload_bytes = 256 * 1024;

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
      peer_label_(peer_label) {}

void CheckedChannel::begin_frame(std::span<const iovec> pieces) {
  std::size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  out_.bytes = static_cast<std::uint32_t>(std::min(total, max_payload_bytes));
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

std::size_t CheckedChannel::try_recv(std::span<const iovec> pieces) {
  if (in_header_bytes_ < sizeof in_) {
    const iovec rest = rest_of(in_, in_header_bytes_);
    in_header_bytes_ += inner_->try_recv({&rest, 1});
    if (in_header_bytes_ < sizeof in_) return 0;
    check_header();
  }
  list_.clear();
  const std::size_t frame_left = in_.bytes - in_payload_bytes_;
  const std::size_t wanted = append_front(list_, pieces, frame_left);
  if (wanted == 0) return 0;
  // The next header comes with the end of this frame: one call less.
  CheckedHeader next;
  if (wanted == frame_left) list_.push_back(rest_of(next, 0));
  const std::size_t received = inner_->try_recv(list_);
  const std::size_t payload = std::min(received, wanted);
  in_crc_ = crc_of_front(in_crc_, list_, payload);
  in_payload_bytes_ += payload;
  if (in_payload_bytes_ == in_.bytes) {
    check_payload();
    ++in_sequence_;
    in_ = next;
    in_header_bytes_ = received - payload;
    in_payload_bytes_ = in_crc_ = 0;
    if (in_header_bytes_ == sizeof in_) check_header();
  }
  count_received(payload);
  return payload;
}

void CheckedChannel::check_header() const {
  if (in_.header_crc != crc_of(in_)) throw_changed("the header of frame " + std::to_string(in_sequence_));
  if (in_.magic == CheckedHeader::right_magic && in_.sequence == in_sequence_ && in_.bytes > 0 &&
      in_.bytes <= max_payload_bytes)
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
    if (nics.find(nic) == std::string::npos) nics += (nics.empty() ? "" : ",") + nic;
  }
  const std::string host = infos.empty() ? "" : infos.front().host;
  throw IntegrityError("communicator '" + communicator_ + "': what " + own_place_ + " received from " +
                           describe_peer(peer_label_, host, nics) + " has changed on its way: " + what +
                           " does not have the CRC32C that it was sent with" + integrity_advice,
                       {.rank = {}, .peer = peer(), .host = host, .nic = nics, .system_errno = {}});
}

void CheckedChannel::append_info(std::vector<ConnectionInfo>& infos) const { inner_->append_info(infos); }

}  // namespace holmes
