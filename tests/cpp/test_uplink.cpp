// Uplink and PathPacer: who is told that something is to be sent, who gives way, and for how long at most.
#include "holmes/transport/uplink.hpp"

#include <netinet/tcp.h>

#include <array>
#include <thread>

#include "check.hpp"
#include "holmes/transport/path_pacer.hpp"
#include "holmes/transport/tcp_channel.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point start{1h};

struct Neighbours final : UplinkNeighbours {
  std::vector<Turn> told;
  int heard = 0;
  std::vector<Carried> carried;
  void tell(const Turn& turn) noexcept override { told.push_back(turn); }
  void tell(const Carried& one) noexcept override { carried.push_back(one); }
  void hear() noexcept override { ++heard; }
};

void turns_are_told_to_those_below_and_again_until_the_last_one_ends() {
  Uplink uplink;
  const auto data = std::make_shared<Neighbours>(), checkpoints = std::make_shared<Neighbours>();
  uplink.join(data, 1, 2);
  uplink.join(checkpoints, 0, 0);
  uplink.begin_turn({3}, start);
  uplink.begin_turn({3}, start + 1ms);
  const std::vector<Turn> begun{{{3}, 2, Uplink::lease}};
  CHECK(data->told == begun);
  CHECK(checkpoints->told == std::vector<Turn>({{{3}, 0, Uplink::lease}}));
  uplink.keep_turn({3}, start + Uplink::renewal - 1ms);
  CHECK(data->told == begun);
  uplink.keep_turn({3}, start + Uplink::renewal);
  CHECK(data->told.size() == 2 && data->told.back() == begun.back());
  uplink.end_turn({3});
  CHECK(data->told.size() == 2);
  uplink.end_turn({3});
  CHECK(data->told.size() == 3 && data->told.back() == Turn({{3}, 2, 0ms}));
  uplink.begin_turn({3}, start + Uplink::renewal + 1ms);  // told at once, however soon
  CHECK(data->told.size() == 4);
  uplink.begin_turn({1}, start);
  CHECK(data->told.size() == 4);
  CHECK(checkpoints->told.back() == Turn({{1}, 0, Uplink::lease}));
}

void those_that_take_turns_are_told_to_groups_of_theirs_and_without_a_priority() {
  Uplink uplink;
  const auto same = std::make_shared<Neighbours>(), none = std::make_shared<Neighbours>();
  const auto above = std::make_shared<Neighbours>();
  uplink.join(same, 2, 0);
  uplink.join(none, std::nullopt, 1);
  uplink.join(above, 3, 0);
  uplink.begin_turn({2}, start);
  CHECK(same->told.empty() && none->told.empty());
  uplink.begin_turn({2, 4}, start);
  CHECK(same->told == std::vector<Turn>({{{2, 4}, 0, Uplink::lease}}));
  CHECK(none->told == std::vector<Turn>({{{2, 4}, 1, Uplink::lease}}));
  uplink.begin_turn({2, 15}, start);
  CHECK(same->told.back() == Turn({{2, 15}, 0, Uplink::lease}) && same->told.size() == 2);
  uplink.end_turn({2, 4});  // not the other's
  CHECK(same->told.back() == Turn({{2, 4}, 0, 0ms}));
  CHECK(above->told.empty());
  const int source = 0;
  uplink.heard(&source, {{2, 4}, 0, Uplink::lease}, start);
  uplink.heard(&source, {{2, 5}, 0, Uplink::lease}, start);
  uplink.heard(&source, {{2, 4}, 0, 0ms}, start);
  CHECK(uplink.gives_way({2, 6}, start) && !uplink.gives_way({2, 5}, start) && uplink.gives_way({1}, start));
  CHECK(!uplink.gives_way({2}, start) && !uplink.gives_way({3, 9}, start));
}

void whoever_is_gone_is_told_nothing() {
  Uplink uplink;
  auto gone = std::make_shared<Neighbours>();
  uplink.join(gone, 1, 0);
  gone.reset();
  uplink.begin_turn({3}, start);
  const auto there = std::make_shared<Neighbours>();
  uplink.join(there, 1, 0);
  uplink.hear(start);
  uplink.hear(start + 1ms);
  CHECK(there->heard == 1);
}

void what_is_told_holds_for_its_lease_at_most() {
  Uplink uplink;
  const int one = 0, other = 0;
  uplink.heard(&one, {{3}, 0, Uplink::lease}, start);
  uplink.heard(&other, {{2}, 0, 10h}, start + 10ms);
  CHECK(uplink.gives_way({1}, start + 10ms) && uplink.gives_way({2}, start + 10ms) &&
        !uplink.gives_way({3}, start + 10ms));
  uplink.heard(&one, {{3}, 0, 0ms}, start + 20ms);  // its end is not the other's
  CHECK(!uplink.gives_way({2}, start + 20ms) && uplink.gives_way({1}, start + 20ms));
  CHECK(uplink.gives_way({1}, start + 10ms + Uplink::lease - 1ms));
  CHECK(!uplink.gives_way({1}, start + 10ms + Uplink::lease));  // its end was lost
}

void what_others_carry_is_added_up_by_path_for_its_lease() {
  Uplink uplink;
  const auto neighbours = std::make_shared<Neighbours>();
  uplink.join(neighbours, std::nullopt, 2);
  uplink.tell(Carried{.path = 7, .teller = 5, .bytes_per_s = 1e6});
  CHECK(neighbours->carried == std::vector<Carried>({{.path = 7, .teller = 5, .bytes_per_s = 1e6, .rail = 2}}));
  uplink.begin_turn({3}, start);
  CHECK(neighbours->told.empty());  // of a group without a priority
  uplink.heard({.path = 7, .teller = 1, .bytes_per_s = 3e6, .is_limit = true}, start);
  uplink.heard({.path = 7, .teller = 1, .bytes_per_s = 1e6, .is_limit = true}, start);  // over another group too
  uplink.heard({.path = 7, .teller = 9, .bytes_per_s = 2e6, .has_told = true}, start);
  uplink.heard({.path = 8, .teller = 9, .bytes_per_s = 9e6}, start);
  Beside beside = uplink.beside(7, 5, start);
  CHECK(beside.bytes_per_s == 3e6 && beside.processes == 2 && beside.one_may_tell && beside.one_has_told);
  beside = uplink.beside(7, 1, start);
  CHECK(beside.bytes_per_s == 2e6 && !beside.one_may_tell && beside.one_has_told);
  beside = uplink.beside(7, 5, start + Uplink::carried_lease);
  CHECK(beside.processes == 0 && beside.bytes_per_s == 0 && beside.one_may_tell);
  CHECK(!uplink.beside(7, 5, start + Uplink::carried_memory).one_may_tell);
}

std::uint64_t rate_of(int fd) {
  std::uint64_t rate = 0;
  socklen_t length = sizeof rate;
  CHECK(::getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &length) == 0);
  return rate;
}

unsigned unsent_limit_of(int fd) {
  unsigned bytes = 0;
  socklen_t length = sizeof bytes;
  CHECK(::getsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, &length) == 0);
  return bytes;
}

constexpr std::uint64_t no_rate = ~std::uint64_t{0};
constexpr std::uint64_t least_rate = 64 * 1024;

struct Stages {
  bool at_once, later, after_a_while, afterwards;  // whether it pauses
  std::uint64_t rate;                              // after a while
  bool operator==(const Stages&) const = default;
};

// Of a stream whose neighbours have something to send for a second.
Stages stages(const Precedence& own, bool crosses, const Precedence& theirs = {2}) {
  const auto [left, right] = tcp_pair();
  PathPacer pacer(left.get(), own, "test0", crosses);
  const auto uplink = Uplink::of("test0");
  const auto neighbours = std::make_shared<Neighbours>();
  uplink->join(neighbours, 1, 0);
  const bool has_to_hear = crosses && (own.priority < highest_priority || own.turn.value_or(0) > 0);
  CHECK(pacer.next_look(true).has_value() == has_to_hear);
  const int source = 0;
  const auto pauses_at = [&](std::chrono::milliseconds at, bool is_told) {
    if (is_told) uplink->heard(&source, {theirs, 0, Uplink::lease}, start + at);
    pacer.before_send(start + at);
    CHECK(rate_of(left.get()) == no_rate || (!pacer.pauses() && unsent_limit_of(left.get()) == 16 * 1024));
    CHECK(!pacer.pauses() || pacer.next_look(false));  // somebody has to look for the end
    return pacer.pauses();
  };
  Stages found{pauses_at(0ms, true), pauses_at(490ms, true), pauses_at(500ms, true), false, rate_of(left.get())};
  CHECK((neighbours->heard > 0) == has_to_hear);
  found.afterwards = pauses_at(500ms + Uplink::lease, false);
  CHECK(rate_of(left.get()) == no_rate);
  return found;
}

void streams_of_lower_priority_give_way_and_go_on() {
  const Stages gives_way{true, true, false, false, least_rate}, goes_on{false, false, false, false, no_rate};
  CHECK(stages({1}, true) == gives_way);
  CHECK(stages({0}, true) == gives_way);
  CHECK(stages({1}, false) == goes_on);
  CHECK(stages({2}, true) == goes_on);
  CHECK(stages({3}, true) == goes_on);
  CHECK(stages({3, 1}, true, {3, 0}) == gives_way);
  CHECK(stages({1, 15}, true, {1, 14}) == gives_way);
  CHECK(stages({1, 0}, true) == gives_way);
  CHECK(stages({3, 0}, true, {3, 1}) == goes_on);
  CHECK(stages({3, 1}, true, {3, 1}) == goes_on);
  CHECK(stages({3}, true, {3, 0}) == goes_on);
  CHECK(stages({3, 1}, true, {3}) == goes_on);
}

void a_channel_that_pauses_sends_nothing_and_wakes_nobody_before_its_look() {
  auto sockets = rail_sockets(1);
  Connection& socket = sockets.left.front();
  socket.pacer = std::make_unique<PathPacer>(socket.fd.get(), Precedence{1}, "test2", true);
  const auto neighbours = std::make_shared<Neighbours>();
  const auto uplink = Uplink::of("test2");
  uplink->join(neighbours, 1, 0);
  TcpChannel channel(1, std::move(socket));
  std::array<std::byte, 100> data{};
  const iovec piece{data.data(), data.size()};
  const int source = 0;
  const auto begun = Clock::now();
  uplink->heard(&source, {{3}, 0, Uplink::lease}, begun);
  const bool sent = channel.try_send({&piece, 1}) > 0;
  std::vector<pollfd> fds;
  CHECK(channel.prepare_wait(true, true, fds) && fds.size() == 1);
  const auto look = channel.next_maintenance(Clock::now());
  if (Clock::now() - begun < Uplink::lease) {  // else the machine slept
    CHECK(!sent && fds.front().events == POLLIN);
    CHECK(look && *look < begun + Uplink::lease);
  }
  std::this_thread::sleep_for(Uplink::lease);
  channel.maintain(Clock::now());
  CHECK(channel.try_send({&piece, 1}) == data.size());
}

// A stream that has sent so much, until all of it is received.
struct Stream {
  std::pair<UniqueFd, UniqueFd> ends = tcp_pair();
  std::shared_ptr<Neighbours> neighbours = std::make_shared<Neighbours>();
  PathPacer pacer;
  std::size_t sent = 0;

  Stream(const Precedence& own, bool crosses) : pacer(ends.first.get(), own, "test1", crosses) {
    Uplink::of("test1")->join(neighbours, 0, 0);
  }
  void send(std::size_t bytes, Clock::time_point now) {
    const std::vector<std::byte> data(bytes);
    pacer.before_send(now);
    const ssize_t count = ::send(ends.first.get(), data.data(), bytes, MSG_DONTWAIT);
    CHECK(count > 0);
    sent += static_cast<std::size_t>(count);
    errno = EAGAIN;
    pacer.after_send(now);
    CHECK(errno == EAGAIN);
  }
  void receive() {
    std::vector<std::byte> data(1 << 16);
    while (sent > 0) {
      const ssize_t count = ::recv(ends.second.get(), data.data(), data.size(), 0);
      CHECK(count > 0);
      if (count <= 0) return;
      sent -= static_cast<std::size_t>(count);
    }
  }
};

void what_waits_for_the_path_is_told_until_it_is_sent() {
  Stream stream({3}, true);
  stream.send(100, start);
  CHECK(stream.neighbours->told.empty());
  CHECK(!stream.pacer.next_look(true));
  stream.send(std::size_t{16} << 20, start);  // more than both sockets hold
  CHECK(stream.neighbours->told == std::vector<Turn>({{{3}, 0, Uplink::lease}}));
  CHECK(stream.pacer.next_look(false).has_value());
  stream.pacer.look(start + 2 * Uplink::renewal);
  CHECK(stream.neighbours->told.size() == 2);
  stream.receive();
  stream.pacer.look(start + 4 * Uplink::renewal);
  CHECK(stream.neighbours->told.size() == 3 && stream.neighbours->told.back() == Turn({{3}, 0, 0ms}));
  CHECK(!stream.pacer.next_look(false));
}

void what_stays_in_the_cluster_or_is_least_is_not_told() {
  for (const auto& [priority, crosses] : {std::pair(3, false), std::pair(0, true)}) {
    Stream stream({priority}, crosses);
    stream.send(std::size_t{16} << 20, start);
    CHECK(stream.neighbours->told.empty());
  }
}

void a_stream_that_ends_ends_its_turn() {
  auto stream = std::make_unique<Stream>(Precedence{3}, true);
  stream->send(std::size_t{16} << 20, start);
  const auto neighbours = stream->neighbours;
  stream.reset();
  CHECK(neighbours->told.size() == 2 && neighbours->told.back().lease == 0ms);
}

}  // namespace

int main() {
  turns_are_told_to_those_below_and_again_until_the_last_one_ends();
  those_that_take_turns_are_told_to_groups_of_theirs_and_without_a_priority();
  whoever_is_gone_is_told_nothing();
  what_is_told_holds_for_its_lease_at_most();
  what_others_carry_is_added_up_by_path_for_its_lease();
  streams_of_lower_priority_give_way_and_go_on();
  a_channel_that_pauses_sends_nothing_and_wakes_nobody_before_its_look();
  what_waits_for_the_path_is_told_until_it_is_sent();
  what_stays_in_the_cluster_or_is_least_is_not_told();
  a_stream_that_ends_ends_its_turn();
  return result("uplink");
}
