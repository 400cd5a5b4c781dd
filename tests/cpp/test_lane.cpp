// A line's lane, with a clock of the test's own: what comes out when, what never does, and how frames are cut.
#include <cstring>
#include <set>

#include "check.hpp"
#include "line/lane.hpp"

using namespace holmes::line;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

using Packet = std::vector<std::uint8_t>;
using Packets = std::vector<Packet>;

constexpr std::size_t ethernet = 10, ip = ethernet + 14;

void put16(Packet& packet, std::size_t at, std::size_t value) {
  packet[at] = static_cast<std::uint8_t>(value >> 8);
  packet[at + 1] = static_cast<std::uint8_t>(value);
}

std::size_t get16(const Packet& packet, std::size_t at) { return std::size_t{packet[at]} << 8 | packet[at + 1]; }

std::size_t get32(const Packet& packet, std::size_t at) { return get16(packet, at) << 16 | get16(packet, at + 2); }

std::size_t folded(const Packet& packet, std::size_t at, std::size_t bytes, std::size_t sum = 0) {
  for (std::size_t i = 0; i < bytes; i += 2) sum += get16(packet, at + i);
  while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

// One packet of nothing in particular.
Packet plain(std::uint8_t mark) {
  Packet packet(ip + 46);
  packet.back() = mark;
  return packet;
}

constexpr std::uint8_t fin = 0x01, psh = 0x08, ack = 0x10, cwr = 0x80;

// A frame of IPv4 or IPv6 with TCP or UDP, whose payload is 0, 1, 2, ...
struct Kind {
  bool is_ipv6, is_tcp;
  std::size_t ip_bytes() const { return is_ipv6 ? 40 : 20; }
  std::size_t transport() const { return ip + ip_bytes(); }
  std::size_t transport_bytes() const { return is_tcp ? 32 : 8; }  // with options
  std::size_t payload() const { return transport() + transport_bytes(); }
  std::uint8_t offload() const { return static_cast<std::uint8_t>(!is_tcp ? 5 : is_ipv6 ? 4 : 1); }
};

// The checksum that is to be completed, of a frame as it must be.
std::size_t pseudo(const Packet& packet, Kind kind) {
  const std::size_t rest = packet.size() - kind.transport() + (kind.is_tcp ? 6 : 17);
  return kind.is_ipv6 ? folded(packet, ip + 8, 32, rest) : folded(packet, ip + 12, 8, rest);
}

Packet super_packet(Kind kind, std::size_t payload_bytes, std::uint16_t gso_size) {
  Packet packet(kind.payload() + payload_bytes);
  const auto transport = static_cast<std::uint16_t>(kind.transport() - ethernet);
  const Offload offload{1, kind.offload(), 0, gso_size, transport, static_cast<std::uint16_t>(kind.is_tcp ? 16 : 6)};
  std::memcpy(packet.data(), &offload, sizeof offload);
  put16(packet, ip - 2, kind.is_ipv6 ? 0x86dd : 0x0800);
  packet[ip] = kind.is_ipv6 ? 0x60 : 0x45;
  for (std::size_t i = 0; i < 8; ++i) packet[ip + kind.ip_bytes() - 8 + i] = static_cast<std::uint8_t>(10 + i);
  if (kind.is_ipv6) {
    put16(packet, ip + 4, packet.size() - kind.transport());
  } else {
    put16(packet, ip + 2, packet.size() - ip);
    put16(packet, ip + 4, 0xfffe);  // its successors begin again at 0
    put16(packet, ip + 10, ~folded(packet, ip, 20) & 0xffff);
  }
  if (kind.is_tcp) {
    put16(packet, kind.transport() + 4, 0xffff);  // a sequence number that wraps around
    put16(packet, kind.transport() + 6, 0xff00);
    packet[kind.transport() + 12] = 8 << 4;
    packet[kind.transport() + 13] = fin | psh | ack | cwr;
    put16(packet, kind.transport() + 16, pseudo(packet, kind));
  } else {
    put16(packet, kind.transport() + 4, packet.size() - kind.transport());
    put16(packet, kind.transport() + 6, pseudo(packet, kind));
  }
  for (std::size_t i = 0; i < payload_bytes; ++i) packet[kind.payload() + i] = static_cast<std::uint8_t>(i % 251);
  return packet;
}

// Whether `part` is what a sender makes of the packets from `first` on, `count` of them, of which all have `total`.
void check_part(const Packet& part, Kind kind, std::size_t first, std::size_t count, std::size_t total,
                std::size_t gso_size) {
  Offload offload;
  std::memcpy(&offload, part.data(), sizeof offload);
  CHECK(offload.flags == 1);
  CHECK(offload.gso_type == (count > 1 ? kind.offload() : 0));
  CHECK(offload.gso_size == (count > 1 ? gso_size : 0));
  CHECK(Layout(part).packets() == count);
  if (kind.is_ipv6) {
    CHECK(get16(part, ip + 4) == part.size() - kind.transport());
  } else {
    CHECK(get16(part, ip + 2) == part.size() - ip);
    CHECK(get16(part, ip + 4) == ((0xfffe + first) & 0xffff));
    CHECK(folded(part, ip, 20) == 0xffff);
  }
  if (kind.is_tcp) {
    CHECK(get32(part, kind.transport() + 4) == ((0xffffff00 + first * gso_size) & 0xffffffff));
    const bool is_first = first == 0, is_last = first + count == total;
    CHECK(part[kind.transport() + 13] == (ack | (is_first ? cwr : 0) | (is_last ? fin | psh : 0)));
  } else {
    CHECK(get16(part, kind.transport() + 4) == part.size() - kind.transport());
  }
  CHECK(get16(part, kind.transport() + (kind.is_tcp ? 16 : 6)) == pseudo(part, kind));
  for (std::size_t i = kind.payload(); i < part.size(); ++i) {
    CHECK(part[i] == (first * gso_size + i - kind.payload()) % 251);
  }
}

void a_frame_is_cut_as_its_sender_would() {
  constexpr std::size_t gso_size = 100, payload = 950, total = 10;
  for (const Kind kind : {Kind{false, true}, Kind{true, true}, Kind{false, false}, Kind{true, false}}) {
    const Packet frame = super_packet(kind, payload, gso_size);
    const Layout layout(frame);
    CHECK(layout.packets() == total);
    check_part(frame, kind, 0, total, total, gso_size);
    CHECK(layout.cut(frame, 0, total) == frame);
    for (const auto& [first, count] : {std::pair{0, 1}, {0, 9}, {3, 1}, {4, 3}, {5, 5}, {9, 1}}) {
      const auto from = static_cast<std::size_t>(first), many = static_cast<std::size_t>(count);
      check_part(layout.cut(frame, from, many), kind, from, many, total, gso_size);
    }
    CHECK(layout.cut(frame, 9, 1).size() == kind.payload() + 50);
  }
}

void what_is_not_understood_is_one_packet() {
  const Packet good = super_packet({false, true}, 950, 100);
  for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
    const Packet part(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(bytes));
    CHECK(Layout(part).packets() <= 10);
    CHECK(Layout(part).cut(part, 0, Layout(part).packets()) == part);
  }
  for (std::size_t at = 0; at < 58; ++at) {
    for (const int value : {0, 1, 4, 5, 0x7f, 0xff}) {
      Packet other = good;
      other[at] = static_cast<std::uint8_t>(value);
      const Layout layout(other);
      if (layout.packets() > 1) CHECK(!layout.cut(other, 1, 1).empty());
    }
  }
}

// What has come out by `now`.
Packets leaving(Lane& lane, Time now) {
  Packets out;
  while (lane.next_due() && *lane.next_due() <= now) {
    out.emplace_back(lane.front().begin(), lane.front().end());
    lane.pop();
  }
  return out;
}

void a_packet_comes_after_the_delay() {
  Lane lane(1);
  lane.set({.delay = 20ms});
  const Time start{};
  lane.take(plain(1), start);
  lane.take(plain(2), start + 5ms);
  CHECK(leaving(lane, start + 19ms).empty());
  CHECK(leaving(lane, start + 20ms) == Packets(1, plain(1)));
  CHECK(*lane.next_due() == start + 25ms);
  CHECK(leaving(lane, start + 1s) == Packets(1, plain(2)));
  CHECK(!lane.next_due());
  CHECK(lane.held_bytes() == 0);
  lane.take(plain(3), start + 1s);
  lane.set({.delay = 1ms});  // what is on its way stays ahead
  lane.take(plain(4), start + 1001ms);
  CHECK(leaving(lane, start + 1019ms).empty());
  CHECK((leaving(lane, start + 1020ms) == Packets{plain(3), plain(4)}));
}

void jitter_keeps_the_order() {
  Lane lane(1);
  lane.set({.delay = 20ms, .jitter = 5ms});
  std::set<Time> dues;
  Duration least = 1h, most{0};
  Time now{};
  for (int i = 0; i < 1000; ++i, now += 20ms) {
    lane.take(plain(static_cast<std::uint8_t>(i)), now);
    const Duration delay = *lane.next_due() - now;
    least = std::min(least, delay);
    most = std::max(most, delay);
    dues.insert(*lane.next_due());
    lane.pop();
  }
  CHECK(least >= 15ms && least < 15100us);
  CHECK(most <= 25ms && most > 24900us);
  CHECK(dues.size() > 900);
  for (int i = 0; i < 200; ++i) lane.take(plain(static_cast<std::uint8_t>(i)), now + i * 100us);
  const auto out = leaving(lane, now + 1s);
  CHECK(out.size() == 200);
  for (std::size_t i = 0; i < out.size(); ++i) CHECK(out[i].back() == i);
}

// Which of `packets` packets come out, in frames of `in_a_frame`.
std::vector<std::size_t> survivors(std::uint64_t seed, double loss, std::size_t packets, std::size_t in_a_frame) {
  Lane lane(seed);
  lane.set({.loss = loss});
  std::vector<std::size_t> found;
  const Kind kind{false, true};
  for (std::size_t i = 0; i < packets; i += in_a_frame) {
    lane.take(super_packet(kind, in_a_frame * 100, 100), {});
    for (const Packet& part : leaving(lane, {})) {
      const std::size_t first = ((get32(part, kind.transport() + 4) - 0xffffff00) & 0xffffffff) / 100;
      for (std::size_t j = 0; j < Layout(part).packets(); ++j) found.push_back(i + first + j);
    }
  }
  CHECK(lane.counters().packets == packets);
  CHECK(lane.counters().lost == packets - found.size());
  return found;
}

void packets_are_lost_alone_and_as_the_seed_says() {
  const auto kept = survivors(7, 0.01, 100'000, 10);
  const double lost = 1 - static_cast<double>(kept.size()) / 100'000;
  CHECK(lost > 0.009 && lost < 0.011);
  CHECK(survivors(7, 0.01, 100'000, 10) == kept);
  CHECK(survivors(8, 0.01, 100'000, 10) != kept);
  // The same packets, however they are put together.
  CHECK(survivors(7, 0.01, 100'000, 50) == kept);
  CHECK(survivors(7, 0, 1000, 10).size() == 1000);
  CHECK(survivors(7, 0.5, 1000, 10).size() > 400);
}

void one_of_many_packets_overtakes() {
  Lane lane(3);
  lane.set({.delay = 20ms, .reorder = 0.1});
  const Time start{};
  lane.take(super_packet({false, true}, 10'000, 100), start);
  std::size_t early = 0, late = 0;
  for (const Packet& part : leaving(lane, start)) {
    CHECK(Layout(part).packets() == 1);
    ++early;
  }
  for (const Packet& part : leaving(lane, start + 20ms)) late += Layout(part).packets();
  CHECK(early > 0 && early < 30);
  CHECK(early + late == 100);
  CHECK(lane.counters().reordered == early);
}

void it_holds_no_more_than_it_may() {
  Lane lane(1);
  lane.set({.delay = 1s, .most_bytes = 10 * plain(0).size()});
  for (std::uint8_t i = 0; i < 12; ++i) lane.take(plain(i), {});
  CHECK(lane.counters().overflowed == 2);
  CHECK(lane.held_bytes() == 10 * plain(0).size());
  CHECK(leaving(lane, Time{} + 1s).size() == 10);
  lane.take(plain(1), Time{} + 1s);
  CHECK(lane.counters().overflowed == 2);
}

void what_waits_for_its_device_is_lost_as_in_a_queue() {
  Lane lane(1);
  lane.set({.delay = 20ms, .most_wait = 50ms});
  const Time start{};
  lane.take(super_packet({false, true}, 1000, 100), start);
  lane.take(plain(2), start + 10ms);
  lane.drop_overdue(start + 70ms);
  CHECK(lane.counters().dropped == 0);
  lane.drop_overdue(start + 71ms);
  CHECK(lane.counters().dropped == 10);
  CHECK(leaving(lane, start + 80ms) == Packets(1, plain(2)));
  lane.drop_overdue(start + 1s);
  CHECK(lane.held_bytes() == 0);
}

}  // namespace

int main() {
  a_frame_is_cut_as_its_sender_would();
  what_is_not_understood_is_one_packet();
  a_packet_comes_after_the_delay();
  jitter_keeps_the_order();
  packets_are_lost_alone_and_as_the_seed_says();
  one_of_many_packets_overtakes();
  it_holds_no_more_than_it_may();
  what_waits_for_its_device_is_lost_as_in_a_queue();
  return result("lane");
}
