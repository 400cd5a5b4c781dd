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
  const std::vector<Turn> sent{{{3}, 0, Uplink::lease}, {{2, 5}, 1, std::chrono::milliseconds(0)}};
  for (const Turn& turn : sent) peer.send_turn(turn);
  std::vector<Turn> told;
  for (std::size_t count = 0; count < rails * sent.size() && watched.has_news(1000); count = told.size()) {
    CHECK(!watched.control.drain());
    for (const Turn& turn : watched.control.take_turns()) told.push_back(turn);
  }
  CHECK(told.size() == rails * sent.size());  // over each rail
  for (std::size_t i = 0; i < told.size(); ++i) CHECK(told[i] == sent[i % sent.size()]);
  peer.send_turn({{3}, 0, 2 * Uplink::lease});
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

std::optional<Probe> told_probe(Watched& watched, int wait_ms) {
  std::optional<Probe> told;
  while (!told && watched.has_news(wait_ms)) {
    CHECK(!watched.control.drain());
    told = watched.control.take_probe();
  }
  return told;
}

void a_question_is_asked_once_over_all_rails() {
  Watched watched;
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  peer.send_probe({1, {}});
  const auto first = told_probe(watched, 1000);
  CHECK(first && first->number == 1 && !first->whole);
  CHECK(!told_probe(watched, 50));  // over the other rail
  peer.send_probe({2, WholeQuestion{7, 3, std::chrono::milliseconds(900)}});
  const auto second = told_probe(watched, 1000);
  CHECK(second && second->number == 2 && second->whole);
  CHECK(second->whole->operation == 7 && second->whole->late == 3);
  CHECK(second->whole->lease == std::chrono::milliseconds(900));
  peer.send_probe({3, WholeQuestion{7, 3, std::chrono::hours(1)}});
  const auto third = told_probe(watched, 1000);
  CHECK(third && third->whole && third->whole->lease == WholeProgress::longest_lease);
  peer.send_probe({2, {}});
  CHECK(!told_probe(watched, 50));
}

void an_answer_is_told_as_it_was_sent() {
  Watched watched;
  ControlConnection peer(0, "a0", "eth0", std::move(watched.sockets.right));
  watched.control.send_probe({5, {}});
  CHECK(!watched.control.probe_reply());
  peer.send_probe_reply({9, 4, "eth1", 5, {8, 7, true}});
  CHECK(watched.has_news(1000) && !watched.control.drain());
  const auto& reply = watched.control.probe_reply();
  CHECK(reply && reply->entered == 9 && reply->unanswered == 4 && reply->nic == "eth1" && reply->number == 5);
  CHECK(reply->whole.entered == 8 && reply->whole.ended == 7 && reply->whole.waits);
}

// Whom a deadline in operation 5 is about: who has called nothing after it, not who waits in it or before it.
void who_is_missing_and_who_waits() {
  CHECK((WholeState{5, 5, false}.is_missing_in(5)));
  CHECK(!(WholeState{6, 5, true}.is_missing_in(5)) && (WholeState{6, 5, true}.only_waits_in(5)));
  CHECK(!(WholeState{5, 4, true}.is_missing_in(5)) && (WholeState{5, 4, true}.only_waits_in(5)));
  CHECK(!(WholeState{6, 5, false}.is_missing_in(5)) && !(WholeState{6, 5, false}.only_waits_in(5)));  // stays in it
  CHECK(!(WholeState{6, 6, false}.is_missing_in(5)) && (WholeState{6, 6, false}.only_waits_in(5)));   // past it
}

void a_question_holds_for_its_lease_and_for_what_comes_before() {
  using std::chrono::milliseconds;
  WholeProgress progress;
  const auto start = Clock::now();
  CHECK(!progress.asked_in(0, start));
  progress.ask({5, 3, milliseconds(400)}, start);
  CHECK(!progress.asked_in(6, start));  // who is past it keeps nobody waiting there
  const auto asked = progress.asked_in(4, start + milliseconds(100));
  CHECK(asked && asked->late == 3 && asked->operation == 4 && asked->lease == milliseconds(300));
  progress.ask({5, 2, milliseconds(100)}, start);  // one that was passed on
  CHECK(progress.asked_in(5, start)->lease == milliseconds(400));
  progress.ask({4, 1, milliseconds(900)}, start);
  CHECK(progress.asked_in(5, start)->late == 3);
  CHECK(!progress.asked_in(5, start + milliseconds(400)));
  CHECK(progress.enter() == 0 && progress.enter() == 1);
  progress.withdraw();
  progress.end();
  CHECK(progress.state().entered == 1 && progress.state().ended == 1 && !progress.state().waits);
  progress.begin_step();
  CHECK(progress.state().waits);
}

}  // namespace

int main() {
  a_question_is_asked_once_over_all_rails();
  an_answer_is_told_as_it_was_sent();
  who_is_missing_and_who_waits();
  a_question_holds_for_its_lease_and_for_what_comes_before();
  what_is_carried_is_told_and_nonsense_is_not_heard();
  turns_are_told_as_they_were_sent();
  a_frame_is_told_until_it_is_read();
  the_ends_of_the_other_rails_wake_nobody_any_more();
  a_lost_rail_is_silent_and_the_other_is_heard();
  return result("control_connection");
}
