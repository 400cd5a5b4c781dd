// RailsChannel over loopback TCP: order, duplicates, lost rails, wrong frames. Deterministic: one thread plays both
// ends.
#include "holmes/transport/rails_channel.hpp"

#include <netinet/tcp.h>

#include <cstring>
#include <random>
#include <thread>

#include "holmes/transport/socket.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr auto patience = 20s;  // for what should take milliseconds

std::shared_ptr<RailsContext> context() {
  auto result = std::make_shared<RailsContext>();
  result->communicator = "test";
  return result;
}

std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> data(bytes);
  std::mt19937 random(17);
  for (auto& value : data) value = static_cast<std::byte>(random());
  return data;
}

bool is_retired(const Channel& channel, std::size_t rail) {
  std::vector<ConnectionInfo> infos;
  channel.append_info(infos);
  return infos[rail].is_retired;
}

std::uint64_t sent_bytes(const Channel& channel, std::size_t rail) {
  std::vector<ConnectionInfo> infos;
  channel.append_info(infos);
  return infos[rail].sent_bytes;
}

// Moves `data` from one channel to the other in pieces of uneven size. `at_half` is called once on the way.
template <class AtHalf>
void transfer(Channel& from, Channel& to, const std::vector<std::byte>& data, AtHalf at_half) {
  std::vector<std::byte> arrived(data.size());
  std::size_t sent = 0;
  std::size_t received = 0;
  bool is_past_half = false;
  const auto end = Clock::now() + patience;
  while (received < data.size() && Clock::now() < end) {
    if (sent < data.size()) {
      const std::size_t first = std::min<std::size_t>(100'003, data.size() - sent);
      const std::size_t second = std::min<std::size_t>(300'007, data.size() - sent - first);
      auto* const begin = const_cast<std::byte*>(data.data()) + sent;
      const iovec pieces[] = {{begin, first}, {begin + first, second}};
      sent += from.try_send(pieces);
    } else {
      from.maintain(Clock::now());
    }
    if (!is_past_half && received >= data.size() / 2) {
      is_past_half = true;
      at_half();
    }
    const std::size_t first = std::min<std::size_t>(7, data.size() - received);
    const std::size_t second = std::min<std::size_t>(77'777, data.size() - received - first);
    const iovec pieces[] = {{arrived.data() + received, first}, {arrived.data() + received + first, second}};
    received += to.try_recv(pieces);
  }
  CHECK(sent == data.size() && received == data.size() && arrived == data);
}

void stream_is_intact() {
  auto sockets = rail_sockets(3);
  RailsChannel left(1, std::move(sockets.left), context()), right(0, std::move(sockets.right), context());
  const auto data = pattern(20'000'000);
  transfer(left, right, data, [] {});
  transfer(right, left, data, [] {});
  for (std::size_t rail = 0; rail < 3; ++rail) CHECK(!is_retired(left, rail) && sent_bytes(left, rail) > 0);
}

void reset_rail_is_survived() {
  auto sockets = rail_sockets(3);
  const int victim = sockets.left[1].fd.get();
  RailsChannel left(1, std::move(sockets.left), context()), right(0, std::move(sockets.right), context());
  const auto data = pattern(20'000'000);
  transfer(left, right, data, [&] { reset_connection(victim); });
  const auto end = Clock::now() + patience;
  while (!(is_retired(left, 1) && is_retired(right, 1)) && Clock::now() < end) {
    left.maintain(Clock::now());
    right.maintain(Clock::now());
    std::this_thread::sleep_for(1ms);
  }
  CHECK(is_retired(left, 1) && is_retired(right, 1) && !is_retired(left, 0) && !is_retired(right, 2));
  const std::uint64_t before = sent_bytes(left, 1);
  transfer(left, right, data, [] {});
  transfer(right, left, data, [] {});
  CHECK(sent_bytes(left, 1) == before);
  // Nothing more to look after once all is acknowledged.
  const auto rest_end = Clock::now() + patience;
  while (left.next_maintenance(Clock::now()) && right.next_maintenance(Clock::now()) && Clock::now() < rest_end) {
    left.maintain(Clock::now());
    right.maintain(Clock::now());
    std::this_thread::sleep_for(1ms);
  }
  CHECK(!left.next_maintenance(Clock::now()) || !right.next_maintenance(Clock::now()));
}

// Three connections of which two are in reserve, as over a far path.
RailSockets reserved_sockets() {
  auto sockets = rail_sockets(3);
  for (auto* side : {&sockets.left, &sockets.right})
    for (std::size_t i = 1; i < side->size(); ++i) (*side)[i].is_reserve = true;
  return sockets;
}

void reserves_rest() {
  auto sockets = reserved_sockets();
  RailsChannel left(1, std::move(sockets.left), context()), right(0, std::move(sockets.right), context());
  transfer(left, right, pattern(20'000'000), [] {});
  transfer(right, left, pattern(20'000'000), [] {});
  for (const auto* channel : {&left, &right})
    CHECK(sent_bytes(*channel, 0) > 20'000'000 && sent_bytes(*channel, 1) == 0 && sent_bytes(*channel, 2) == 0);
}

void reserves_stand_in_for_a_lost_connection() {
  auto sockets = reserved_sockets();
  const int victim = sockets.left[0].fd.get();
  RailsChannel left(1, std::move(sockets.left), context()), right(0, std::move(sockets.right), context());
  const auto data = pattern(20'000'000);
  transfer(left, right, data, [&] { reset_connection(victim); });
  transfer(right, left, data, [] {});
  CHECK(sent_bytes(left, 1) > 0 && sent_bytes(left, 2) > 0 && sent_bytes(right, 1) > 0);
}

// With a limit on what waits unsent a socket takes no more long before its buffer is full.
void a_full_buffer_is_told_apart() {
  for (const bool is_limited : {true, false}) {
    const auto [left, right] = tcp_pair();
    ::fcntl(left.get(), F_SETFL, ::fcntl(left.get(), F_GETFL) | O_NONBLOCK);
    CHECK(set_option(left.get(), SOL_SOCKET, SO_SNDBUF, 1 << 21));
    if (is_limited) CHECK(set_option(left.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, 1 << 15));
    const std::vector<std::byte> data(1 << 16);
    CHECK(!is_buffer_full(left.get()));
    while (::send(left.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0) continue;
    CHECK(is_buffer_full(left.get()) == !is_limited);
  }
}

void all_rails_ended_is_the_end() {
  auto sockets = rail_sockets(2);
  RailsChannel left(1, std::move(sockets.left), context()), right(0, std::move(sockets.right), context());
  transfer(left, right, pattern(100'000), [] {});
  left.shutdown();
  bool is_closed = false;
  std::byte byte;
  const iovec piece{&byte, 1};
  const auto end = Clock::now() + patience;
  while (!is_closed && Clock::now() < end) {
    try {
      right.try_recv({&piece, 1});
    } catch (const StreamClosed& closed) {
      is_closed = true;
      CHECK(closed.peer == 0 && closed.system_errno == 0);
    }
  }
  CHECK(is_closed);
}

// A channel whose peer is the test, frame by frame.
class Scripted {
public:
  explicit Scripted(int rails) : sockets_(rail_sockets(rails)), channel_(1, std::move(sockets_.left), context()) {}
  // Writes the first `bytes` (absent: all) of a chunk whose payload is `value` in every byte.
  void write(int rail, std::uint64_t sequence, std::uint32_t bytes, char value, std::uint32_t part) {
    Frame frame;
    frame.header.bytes = bytes;
    frame.header.sequence = sequence;
    frame.header.crc = frame.header.right_crc();
    std::memset(frame.payload.data(), value, bytes);
    write_raw(rail, frame.wire(), sizeof(FrameHeader) + part);
  }
  void write(int rail, std::uint64_t sequence, std::uint32_t bytes, char value) {
    write(rail, sequence, bytes, value, bytes);
  }
  void write_raw(int rail, const void* bytes, std::size_t count) {
    CHECK(::send(fd(rail), bytes, count, 0) == static_cast<ssize_t>(count));
  }
  // What arrives within a while, `limit` bytes at most.
  std::string read(std::size_t limit) {
    std::string text(limit, '?');
    std::size_t got = 0;
    const auto end = Clock::now() + 200ms;
    while (got < limit && Clock::now() < end) {
      const iovec piece{text.data() + got, limit - got};
      got += channel_.try_recv({&piece, 1});
    }
    text.resize(got);
    return text;
  }
  int fd(int rail) const { return sockets_.right[static_cast<std::size_t>(rail)].fd.get(); }
  RailsChannel& channel() { return channel_; }

private:
  RailSockets sockets_;
  RailsChannel channel_;
};

void early_and_double_chunks() {
  Scripted peer(2);
  peer.write(1, 2, 3, 'c');
  peer.write(1, 1, 3, 'b');
  CHECK(peer.read(9).empty());
  peer.write(0, 0, 3, 'a');
  CHECK(peer.read(4) == "aaab");
  peer.write(0, 1, 3, 'x');  // all of these are known by now, or were when they began
  peer.write(0, 2, 3, 'x');
  peer.write(0, 0, 3, 'x');
  peer.write(0, 3, 3, 'd');
  CHECK(peer.read(100) == "bbcccddd");
}

void broken_off_chunk_goes_on_elsewhere() {
  Scripted peer(2);
  peer.write(0, 0, 6, 'a', 2);
  CHECK(peer.read(6) == "aa");
  peer.write(1, 0, 6, 'a');
  peer.write(1, 1, 2, 'b');
  CHECK(peer.read(100) == "aaaabb");
  peer.write_raw(0, "aaaa", 4);  // the rest comes after all
  peer.write(0, 2, 2, 'c');
  CHECK(peer.read(100) == "cc");
  // The same with a chunk that began before its turn.
  peer.write(0, 4, 6, 'e', 2);
  CHECK(peer.read(100).empty());
  peer.write(1, 3, 1, 'd');
  peer.write(1, 4, 6, 'e');
  CHECK(peer.read(100) == "deeeeee");
}

void full_window_waits() {
  Scripted peer(2);
  peer.write(1, window_chunks, 1, 'z');  // no room before chunk 0 has gone
  CHECK(peer.read(1).empty());
  for (std::uint64_t sequence = 0; sequence < window_chunks; ++sequence) peer.write(0, sequence, 1, 'a');
  CHECK(peer.read(window_chunks + 1) == std::string(window_chunks, 'a') + "z");
}

void retired_by_the_peer() {
  Scripted peer(2);
  FrameHeader notice;
  notice.kind = FrameKind::retire;
  notice.rail = 0;
  notice.crc = notice.right_crc();
  peer.write_raw(1, &notice, sizeof notice);
  CHECK(peer.read(1).empty());
  CHECK(is_retired(peer.channel(), 0) && !is_retired(peer.channel(), 1));
  notice.rail = 1;  // the last one stays in use
  notice.crc = notice.right_crc();
  peer.write_raw(1, &notice, sizeof notice);
  CHECK(peer.read(1).empty());
  CHECK(!is_retired(peer.channel(), 1));
  std::string text = "hello";
  const iovec piece{text.data(), text.size()};
  CHECK(peer.channel().try_send({&piece, 1}) == text.size());
  CHECK(sent_bytes(peer.channel(), 0) == 0 && sent_bytes(peer.channel(), 1) == sizeof(FrameHeader) + text.size());
  peer.write(0, 0, 2, 'a');  // what still comes on a retired rail counts
  CHECK(peer.read(2) == "aa");
}

void wrong_frames_are_refused() {
  const auto refuses = [](FrameHeader header, std::uint32_t before = 0) {
    Scripted peer(2);
    if (before > 0) {
      peer.write(1, 0, before, 'a', 1);
      CHECK(peer.read(1) == "a");
    }
    header.crc = header.right_crc();
    peer.write_raw(0, &header, sizeof header);
    return contains(message_of<ProtocolError>([&] { peer.read(1); }), "all processes must run the same version");
  };
  CHECK(refuses({.magic = 7, .bytes = 1}));
  CHECK(refuses({.bytes = 0}));
  CHECK(refuses({.bytes = max_chunk_bytes + 1}));
  CHECK(refuses({.kind = FrameKind{9}, .bytes = 1}));
  CHECK(refuses({.kind = FrameKind::retire, .rail = 2}));
  CHECK(refuses({.kind = FrameKind::retire, .rail = 1, .bytes = 4}));
  CHECK(refuses({.bytes = 5}, 6));  // the same chunk, of another length
}

}  // namespace

int main() {
  stream_is_intact();
  reset_rail_is_survived();
  reserves_rest();
  reserves_stand_in_for_a_lost_connection();
  a_full_buffer_is_told_apart();
  all_rails_ended_is_the_end();
  early_and_double_chunks();
  broken_off_chunk_goes_on_elsewhere();
  full_window_waits();
  retired_by_the_peer();
  wrong_frames_are_refused();
  return result("rails_channel");
}
