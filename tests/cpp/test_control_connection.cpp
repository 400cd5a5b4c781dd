// What a control connection tells the epoll that watches it: whoever sleeps on it must wake for news, and for them
// only.
#include "holmes/group/control_connection.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <limits>

#include "check.hpp"
#include "rail_sockets.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr int rails = 2;

struct Watched {
  RailSockets sockets = rail_sockets(rails);
  UniqueFd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  ControlConnection control{1, "b1", "eth0", std::move(sockets.left)};

  Watched() { control.watch_with(epoll.get(), 1); }
  bool has_news(int wait_ms) const {
    pollfd fd{epoll.get(), POLLIN, 0};
    return ::poll(&fd, 1, wait_ms) == 1;
  }
};

void a_frame_is_told_until_it_is_read() {
  Watched watched;
  CHECK(!watched.has_news(0));
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  peer.send_doorbell();
  CHECK(watched.has_news(1000));
  while (watched.has_news(50)) CHECK(!watched.control.drain());
  CHECK(!watched.control.is_closed());
}

// The first end tells that the process is gone; nobody drains after it, and the others end a moment later.
void the_ends_of_the_other_rails_wake_nobody_any_more() {
  for (int first = 0; first < rails; ++first) {
    Watched watched;
    watched.sockets.right[static_cast<std::size_t>(first)].fd.reset();
    CHECK(watched.has_news(1000) && !watched.control.drain());
    CHECK(watched.control.is_closed());
    watched.sockets.right.clear();
    CHECK(!watched.has_news(50));
  }
}

void a_lost_rail_is_silent_and_the_other_is_heard() {
  Watched watched;
  reset_connection(watched.sockets.right[0].fd.get());
  CHECK(watched.has_news(1000) && !watched.control.drain());
  CHECK(!watched.control.is_closed());
  CHECK(!watched.has_news(50));
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  peer.send_bye();
  CHECK(watched.has_news(1000) && !watched.control.drain());
  CHECK(watched.control.said_bye());
}

void turns_are_told_as_they_were_sent() {
  Watched watched;
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  const std::vector<Turn> sent{{3, 0, Uplink::lease}, {2, 1, std::chrono::milliseconds(0)}};
  for (const Turn& turn : sent) peer.send_turn(turn);
  std::vector<Turn> told;
  for (std::size_t count = 0; count < rails * sent.size() && watched.has_news(1000); count = told.size()) {
    CHECK(!watched.control.drain());
    for (const Turn& turn : watched.control.take_turns()) told.push_back(turn);
  }
  CHECK(told.size() == rails * sent.size());  // over each rail
  for (std::size_t i = 0; i < told.size(); ++i) CHECK(told[i] == sent[i % sent.size()]);
  peer.send_turn({3, 0, 2 * Uplink::lease});
  CHECK(watched.has_news(1000) && !watched.control.drain() && watched.control.take_turns().empty());
}

void what_is_carried_is_told_and_nonsense_is_not_heard() {
  Watched watched;
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  const Carried sent{.path = 1, .teller = ~std::uint64_t{0}, .bytes_per_s = 25e6, .is_limit = true, .rail = 2};
  peer.send_carried(sent);
  std::vector<Carried> told;
  for (std::size_t count = 0; count < rails && watched.has_news(1000); count = told.size()) {
    CHECK(!watched.control.drain());
    for (const Carried& one : watched.control.take_carried()) told.push_back(one);
  }
  CHECK(told == std::vector<Carried>(rails, sent));
  for (const double rate : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    peer.send_carried({.path = 1, .teller = 1, .bytes_per_s = rate});
    CHECK(watched.has_news(1000) && !watched.control.drain() && watched.control.take_carried().empty());
  }
}

}  // namespace

int main() {
  what_is_carried_is_told_and_nonsense_is_not_heard();
  turns_are_told_as_they_were_sent();
  a_frame_is_told_until_it_is_read();
  the_ends_of_the_other_rails_wake_nobody_any_more();
  a_lost_rail_is_silent_and_the_other_is_heard();
  return result("control_connection");
}
