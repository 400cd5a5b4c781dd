#include "holmes/group/control_connection.hpp"

#include <net/if.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <string_view>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

enum FrameType : std::uint32_t {
  doorbell = 1,
  abort_frame = 2,
  bye = 3,
  probe_frame = 4,
  probe_reply_frame = 5,
  turn_frame = 6,
  carried_frame = 7
};

struct ControlHeader {
  std::uint32_t type;
  std::uint32_t payload_bytes;
};

constexpr std::size_t max_payload_bytes = 8192;
constexpr std::size_t max_text_bytes = 4096;
constexpr std::size_t most_pieces = 7;    // of a frame's payload
constexpr std::size_t most_untaken = 64;  // turns, and what is carried: more than are told at once
constexpr std::uint32_t most_rails = 256;

// Numbers of an abort frame: kind, rank, peer, errno; -1 stands for "absent" on the wire only.
using Numbers = std::array<std::int32_t, 4>;

std::optional<int> from_wire(std::int32_t value) { return value < 0 ? std::nullopt : std::optional<int>(value); }

struct TurnPayload {
  std::uint32_t priority;
  std::int32_t turn;  // -1: none
  std::uint32_t rail;
  std::uint32_t lease_ms;
};

struct CarriedPayload {
  std::uint64_t path;
  std::uint64_t teller;
  double bytes_per_s;
  std::uint32_t rail;
  std::uint32_t is_limit : 1, has_told : 1, unused : 30;
};

struct ProbePayload {
  std::uint64_t number;
  std::uint64_t operation;
  std::int32_t late;
  std::uint32_t lease_ms;  // 0: no question about a whole
};

// How a ProbeReply begins on the wire; the NIC's name follows.
struct ProbeReplyHeader {
  std::uint64_t entered;
  std::int32_t unanswered;  // -1: none
  std::uint32_t waits_in_whole : 1, unused : 31;
  std::uint64_t number;
  std::uint64_t entered_in_whole;
  std::uint64_t ended_in_whole;
};

}  // namespace

// Takes no memory: what it tells may be that there is none.
void ControlConnection::send_frame(std::uint32_t type, std::initializer_list<std::string_view> payload) noexcept {
  ControlHeader header{type, 0};
  std::array<iovec, 1 + most_pieces> pieces;
  pieces[0] = {&header, sizeof header};
  std::size_t count = 1;
  for (const std::string_view piece : payload) {
    pieces[count++] = {const_cast<char*>(piece.data()), piece.size()};
    header.payload_bytes += static_cast<std::uint32_t>(piece.size());
  }
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = count;
  // Not sent where the socket is full or gone: see the header.
  for (const Line& line : lines_) [[maybe_unused]]
    const ssize_t sent = line.socket.post(message);
}

void ControlConnection::send_doorbell() noexcept { send_frame(doorbell, {}); }
void ControlConnection::send_bye() noexcept { send_frame(bye, {}); }

void ControlConnection::send_probe(const Probe& probe) noexcept {
  probe_reply_.reset();
  ProbePayload payload{probe.number, 0, 0, 0};
  if (probe.whole) {
    payload.operation = probe.whole->operation;
    payload.late = probe.whole->late;
    payload.lease_ms = static_cast<std::uint32_t>(probe.whole->lease.count());
  }
  send_frame(probe_frame, {{reinterpret_cast<const char*>(&payload), sizeof payload}});
}

void ControlConnection::send_probe_reply(const ProbeReply& reply) noexcept {
  const ProbeReplyHeader header{reply.entered, reply.unanswered.value_or(-1), reply.whole.waits, 0,
                                reply.number,  reply.whole.entered,           reply.whole.ended};
  send_frame(probe_reply_frame, {{reinterpret_cast<const char*>(&header), sizeof header}, reply.nic});
}

void ControlConnection::send_turn(const Turn& turn) noexcept {
  const TurnPayload payload{static_cast<std::uint32_t>(turn.of.priority), turn.of.turn.value_or(-1),
                            static_cast<std::uint32_t>(turn.rail), static_cast<std::uint32_t>(turn.lease.count())};
  send_frame(turn_frame, {{reinterpret_cast<const char*>(&payload), sizeof payload}});
}

void ControlConnection::send_carried(const Carried& carried) noexcept {
  const CarriedPayload payload{carried.path,
                               carried.teller,
                               carried.bytes_per_s,
                               static_cast<std::uint32_t>(carried.rail),
                               carried.is_limit,
                               carried.has_told,
                               0};
  send_frame(carried_frame, {{reinterpret_cast<const char*>(&payload), sizeof payload}});
}

void ControlConnection::send_abort(const Failure& failure) noexcept {
  const Numbers numbers = {static_cast<std::int32_t>(failure.kind), failure.context.rank.value_or(-1),
                           failure.context.peer.value_or(-1), failure.context.system_errno.value_or(-1)};
  // Strings end with a zero byte each: host, NIC, message.
  constexpr std::string_view zero{"", 1};
  const std::string_view text = failure.message;
  send_frame(abort_frame, {{reinterpret_cast<const char*>(numbers.data()), sizeof numbers},
                           failure.context.host,
                           zero,
                           failure.context.nic,
                           zero,
                           text.substr(0, max_text_bytes),
                           zero});
}

void ControlConnection::watch_with(int epoll_fd, std::uint32_t number) {
  epoll_fd_ = epoll_fd;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u32 = number;
  for (const Line& line : lines_)
    if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, line.socket.fd.get(), &event) != 0)
      throw SystemError("cannot watch a control connection: " + errno_text(errno) +
                            (errno == ENOSPC ? "; raise the limit of watches (sysctl fs.epoll.max_user_watches)" : ""),
                        {.system_errno = errno});
}

// Its end, and what nobody drains any more, would be told again and again.
void ControlConnection::unwatch(const Line& line) const {
  if (epoll_fd_ >= 0) ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, line.socket.fd.get(), nullptr);
}

void ControlConnection::append_info(std::vector<ConnectionInfo>& infos) const {
  for (const Line& line : lines_) infos.push_back(line.socket.info);
}

bool ControlConnection::is_cut() const {
  const int error = lost_errno();
  return closed_ && (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH);
}

std::optional<Failure> ControlConnection::drain() {
  for (Line& line : lines_)
    if (auto failure = drain(line)) return failure;
  closed_ |= std::all_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.is_lost; });
  for (const Line& line : lines_)
    if (closed_ || line.is_lost) unwatch(line);
  return std::nullopt;
}

std::optional<Failure> ControlConnection::drain(Line& line) {
  std::array<char, 4096> buffer;
  while (!line.is_lost) {
    iovec piece{buffer.data(), buffer.size()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const ssize_t bytes = line.socket.recv(message);
    if (bytes > 0) {
      line.received.append(buffer.data(), static_cast<std::size_t>(bytes));
      if (auto failure = parse(line.received)) return failure;
    } else if (bytes == 0) {
      line.is_lost = closed_ = ended_in_order_ = true;
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      line.is_lost = true;
      lost_errno_ = errno;
    } else if (errno != EINTR) {
      break;
    }
  }
  return std::nullopt;
}

void ControlConnection::take_probe(std::string_view payload) {
  ProbePayload said;
  std::memcpy(&said, payload.data(), sizeof said);
  if (said.number <= last_probe_) return;
  last_probe_ = said.number;
  probe_ = {said.number, {}};
  const std::chrono::milliseconds lease(said.lease_ms);
  if (said.lease_ms > 0) probe_->whole = {said.operation, said.late, std::min(lease, WholeProgress::longest_lease)};
}

void ControlConnection::take_probe_reply(std::string_view payload) {
  ProbeReplyHeader said;
  std::memcpy(&said, payload.data(), sizeof said);
  probe_reply_ = {said.entered,
                  from_wire(said.unanswered),
                  std::string(payload.substr(sizeof said, IFNAMSIZ)),
                  said.number,
                  {said.entered_in_whole, said.ended_in_whole, said.waits_in_whole == 1}};
}

void ControlConnection::take_turn(std::string_view payload) {
  TurnPayload said;
  std::memcpy(&said, payload.data(), sizeof said);
  if (turns_.size() == most_untaken || said.priority > highest_priority || said.turn < -1 || said.turn > last_turn ||
      said.rail > most_rails || said.lease_ms > Uplink::lease.count())
    return;
  turns_.push_back({{static_cast<int>(said.priority), from_wire(said.turn)},
                    static_cast<int>(said.rail),
                    std::chrono::milliseconds(said.lease_ms)});
}

void ControlConnection::take_carried(std::string_view payload) {
  CarriedPayload said;
  std::memcpy(&said, payload.data(), sizeof said);
  const bool is_rate = std::isfinite(said.bytes_per_s) && said.bytes_per_s >= 0;
  if (carried_.size() == most_untaken || said.rail > most_rails || !is_rate) return;
  carried_.push_back(
      {said.path, said.teller, said.bytes_per_s, said.is_limit == 1, said.has_told == 1, static_cast<int>(said.rail)});
}

std::optional<Failure> ControlConnection::parse(std::string& received) {
  while (received.size() >= sizeof(ControlHeader)) {
    ControlHeader header;
    std::memcpy(&header, received.data(), sizeof header);
    const bool known = header.type >= doorbell && header.type <= carried_frame;
    if (!known || header.payload_bytes > max_payload_bytes)
      return Failure{ErrorKind::protocol,
                     describe() + " sent a control frame of type " + std::to_string(header.type) + " and " +
                         std::to_string(header.payload_bytes) + " bytes, which this version does not know",
                     {.rank = {}, .peer = peer_, .host = host_, .nic = nic_, .system_errno = {}}};
    if (received.size() < sizeof header + header.payload_bytes) return std::nullopt;
    const std::string payload = received.substr(sizeof header, header.payload_bytes);
    received.erase(0, sizeof header + header.payload_bytes);
    if (header.type == bye) bye_ = true;
    if (header.type == probe_frame && payload.size() >= sizeof(ProbePayload)) take_probe(payload);
    if (header.type == probe_reply_frame && payload.size() >= sizeof(ProbeReplyHeader)) take_probe_reply(payload);
    if (header.type == turn_frame && payload.size() >= sizeof(TurnPayload)) take_turn(payload);
    if (header.type == carried_frame && payload.size() >= sizeof(CarriedPayload)) take_carried(payload);
    if (header.type != abort_frame || payload.size() < sizeof(Numbers)) continue;
    Numbers numbers;
    std::memcpy(numbers.data(), payload.data(), sizeof numbers);
    std::array<std::string, 3> texts;
    std::size_t at = sizeof numbers;
    for (std::string& text : texts) {
      const std::size_t end = std::min(payload.find('\0', at), payload.size());
      text = payload.substr(std::min(at, payload.size()), end - std::min(at, payload.size()));
      at = end + 1;
    }
    return Failure{static_cast<ErrorKind>(numbers[0]),
                   texts[2],
                   {.rank = from_wire(numbers[1]),
                    .peer = from_wire(numbers[2]),
                    .host = texts[0],
                    .nic = texts[1],
                    .system_errno = from_wire(numbers[3])}};
  }
  return std::nullopt;
}

}  // namespace holmes
