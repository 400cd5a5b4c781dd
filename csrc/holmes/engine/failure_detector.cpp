#include "holmes/engine/failure_detector.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "holmes/engine/io_thread.hpp"

namespace holmes {
namespace {

// How long to look for the reason after a stream ended: the abort frame of the peer may come a little later.
constexpr auto reason_grace = std::chrono::milliseconds(300);
// How long ranks have to say that they wait too.
constexpr auto probe_time = std::chrono::milliseconds(200);
// How long a rank whose peers all wait too leaves it to those beside the culprit, who know more, to name it.
constexpr auto deferral = std::chrono::seconds(1);

}  // namespace

FailureDetector::FailureDetector(Group& group, const Operations& operations, std::string own_place)
    : group_(group),
      operations_(operations),
      own_place_(std::move(own_place)),
      controls_(::epoll_create1(EPOLL_CLOEXEC)),
      lost_(static_cast<std::size_t>(group.size)) {
  if (!controls_)
    throw SystemError("cannot make an epoll descriptor: " + errno_text(errno) + limit_text(errno),
                      {.system_errno = errno});
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank) group_.controls[peer]->watch_with(controls_.get(), static_cast<std::uint32_t>(peer));
}

template <typename Wanted>
std::optional<int> FailureDetector::first_peer(const Wanted& is_wanted) const {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && is_wanted(peer)) return peer;
  return std::nullopt;
}

void FailureDetector::check_controls() {
  for (int peer = 0; !has_looked_ && peer < group_.size; ++peer)
    if (peer != group_.rank) check_control(peer);
  has_looked_ = true;
  std::array<epoll_event, 64> events;
  while (true) {
    const int count = ::epoll_wait(controls_.get(), events.data(), static_cast<int>(events.size()), 0);
    std::sort(events.begin(), events.begin() + std::max(count, 0),
              [](const auto& one, const auto& other) { return one.data.u32 < other.data.u32; });
    for (int i = 0; i < count; ++i) check_control(static_cast<int>(events[static_cast<std::size_t>(i)].data.u32));
    if (count < static_cast<int>(events.size())) return;
  }
}

void FailureDetector::check_control(int peer) {
  if (is_lost(peer)) return;
  ControlConnection& control = *group_.controls[peer];
  if (const auto failure = control.drain())
    throw_error(failure->kind, failure->message + " [reported by " + control.describe() + "]", failure->context);
  for (const Turn& turn : control.take_turns()) {
    const auto rail = static_cast<std::size_t>(turn.rail);
    if (rail < group_.uplinks.size()) group_.uplinks[rail]->heard(&control, turn, Clock::now());
  }
  for (const Carried& carried : control.take_carried()) {
    const auto rail = static_cast<std::size_t>(carried.rail);
    if (rail < group_.uplinks.size()) group_.uplinks[rail]->heard(carried, Clock::now());
  }
  if (control.is_closed()) lost_[static_cast<std::size_t>(peer)] = has_lost_any_ = true;
  if (control.take_probe()) {
    const auto unanswered = unanswered_peer();
    const std::string nic = unanswered ? group_.controls[*unanswered]->nic() : "";
    control.send_probe_reply({operations_.entered(), unanswered, nic});
  }
}

void FailureDetector::wait_for_controls(Clock::time_point until) const {
  std::vector<pollfd> fds{controls_pollfd()};
  poll_until(fds, until);
}

bool FailureDetector::is_missed(int peer) const {
  if (!is_lost(peer)) return false;
  if (group_.controls[peer]->is_cut()) return involves(peer);
  // Else who reads a stream that tells its end sees it there, behind all that was sent.
  const P2pEngine& p2p = operations_.p2p();
  if (operations_.runs_with(peer) && !group_.channels[peer]->tells_end()) return true;
  return p2p_needs(peer) && (!p2p.channels()[peer]->tells_end() || p2p.has_ended(peer));
}

std::optional<int> FailureDetector::vanished_peer() const {
  return first_peer([&](int peer) { return is_lost(peer) && !has_left_in_order(peer); });
}

void FailureDetector::throw_stream_closed(const StreamClosed& closed) {
  // The stream ended, but why? Somebody may be telling already.
  const auto end = Clock::now() + reason_grace;
  while (true) {
    check_controls();
    if (is_lost(closed.peer) || Clock::now() >= end) break;
    wait_for_controls(end);
  }
  // Who left in order may have done so because of one that did not.
  const auto vanished =
      first_peer([&](int peer) { return is_lost(peer) && !has_left_in_order(peer) && involves(peer); });
  if (vanished && has_left_in_order(closed.peer)) throw_peer_lost(*vanished, 0);
  throw_peer_lost(closed.peer, closed.system_errno);
}

void FailureDetector::throw_peer_lost(int peer, int system_errno) const {
  const ControlConnection& control = *group_.controls[peer];
  if (system_errno == 0 && control.is_cut()) system_errno = control.lost_errno();
  const std::string how = control.said_bye()  ? farewell
                          : system_errno != 0 ? "is lost: " + errno_text(system_errno)
                                              : "is lost: it closed its connections (its process ended?)";
  ErrorContext context = context_of(peer);
  if (system_errno != 0) context.system_errno = system_errno;
  throw PeerLostError(
      control.describe() + " " + how + " during " + operations_.describe_running() + ", seen by " + own_place_,
      context);
}

ErrorContext FailureDetector::context_of(int peer) const {
  const ControlConnection& control = *group_.controls[peer];
  ErrorContext context = own_context();
  context.peer = group_.label(peer);
  context.host = control.host();
  context.nic = control.nic();
  return context;
}

ErrorContext FailureDetector::own_context() const {
  return {.rank = group_.label(group_.rank), .peer = {}, .host = {}, .nic = {}, .system_errno = {}};
}

std::optional<Clock::time_point> FailureDetector::next_deadline() const {
  auto next = operations_.next_deadline();
  if (next && deferred_until_) next = std::max(*next, *deferred_until_);
  return next;
}

// Who waits too, and who is waited for? In an operation of several steps, and in a chain of messages, a silent peer may
// only wait for another one.
FailureDetector::Replies FailureDetector::probe_peers() {
  Replies replies(static_cast<std::size_t>(group_.size));
  const auto for_each_peer = [&](const auto& visit) {
    for (int peer = 0; peer < group_.size; ++peer)
      if (peer != group_.rank && !is_lost(peer)) visit(peer, *group_.controls[peer]);
  };
  for_each_peer([](int, ControlConnection& control) { control.send_probe(); });
  const auto end = Clock::now() + probe_time;
  while (true) {
    check_controls();
    bool all_replied = true;
    for_each_peer([&](int peer, ControlConnection& control) {
      replies[static_cast<std::size_t>(peer)] = control.probe_reply();
      all_replied &= control.probe_reply().has_value();
    });
    if (all_replied || Clock::now() >= end) return replies;
    wait_for_controls(end);
  }
}

std::optional<int> FailureDetector::unanswered_peer() const {
  return first_peer([&](int peer) {
    return !is_lost(peer) &&
           (group_.channels[peer]->is_unanswered() || operations_.p2p().channels()[peer]->is_unanswered());
  });
}

std::optional<FailureDetector::Cut> FailureDetector::find_cut(const Replies& replies) const {
  if (const auto peer = unanswered_peer()) return Cut{group_.rank, *peer, group_.controls[*peer]->nic()};
  for (int peer = 0; peer < group_.size; ++peer) {
    const auto& reply = replies[static_cast<std::size_t>(peer)];
    if (!reply || !reply->unanswered || *reply->unanswered == peer || *reply->unanswered >= group_.size) continue;
    if (*reply->unanswered == group_.rank) return Cut{group_.rank, peer, reply->nic};
    return Cut{peer, *reply->unanswered, reply->nic};
  }
  return std::nullopt;
}

std::optional<Failure> FailureDetector::check_deadlines(Clock::time_point now) {
  const bool late = operations_.is_late(now);
  const std::string overdue = operations_.p2p().describe_overdue(now);
  if (!late && overdue.empty()) deferred_until_.reset();
  if ((!late && overdue.empty()) || (deferred_until_ && now < *deferred_until_)) return std::nullopt;
  const Replies replies = probe_peers();
  const Collective* running = operations_.running();
  std::vector<char> entered(static_cast<std::size_t>(group_.size));
  for (std::size_t peer = 0; late && peer < entered.size(); ++peer)
    entered[peer] = replies[peer].value_or(ProbeReply{}).entered > running->sequence();
  const auto is_silent = [&](int peer) { return !replies[static_cast<std::size_t>(peer)]; };
  const auto is_missing = [&](int peer) { return late && !entered[static_cast<std::size_t>(peer)]; };
  const auto silent = first_peer([&](int peer) { return is_silent(peer) && involves(peer); });
  const auto cut = silent ? std::nullopt : find_cut(replies);
  // Who answers only waits for somebody too, be it in another operation. Whose messages are late and who is answered by
  // all has nobody to leave it to: no rank is beside a culprit.
  const bool any_silent = first_peer(is_silent).has_value();
  if (!deferred_until_ && !silent && !cut && any_silent != late) {
    deferred_until_ = now + deferral;
    return std::nullopt;
  }
  // Whom to blame: somebody silent, else the far end of a path that is cut, else somebody missing, first one with whom
  // bytes are open; else one of these. (Who is silent and not waited for may just be computing.)
  auto culprit = cut ? cut->far : silent;
  if (!culprit) culprit = first_peer([&](int peer) { return is_silent(peer) && is_missing(peer); });
  if (!culprit) culprit = first_peer([&](int peer) { return is_missing(peer) && involves(peer); });
  if (!culprit) culprit = first_peer(is_missing);
  if (!culprit) culprit = first_peer([&](int peer) { return involves(peer); });
  std::string text = own_place_ + ": the deadline passed in ";
  if (late)
    text += running->describe() + ", waiting for " + running->describe_wait(entered);
  else
    text += "communicator '" + group_.name + "': " + overdue;
  ErrorContext context = culprit ? context_of(*culprit) : own_context();
  if (culprit && !late && is_silent(*culprit))
    text += "; " + group_.controls[*culprit]->describe() +
            " answers nothing (it computes, or it is cut off, powered off or stopped)";
  if (cut) {
    const std::string near = cut->near == group_.rank ? own_place_ : group_.controls[cut->near]->describe();
    text +=
        "; nothing gets through from " + near + " to " + describe_peer(group_.label(cut->far), context.host, cut->nic);
    context.rank = group_.label(cut->near);
    context.nic = cut->nic;
  }
  return Failure{ErrorKind::timeout, text + "; raise the timeout if this is expected", context};
}

}  // namespace holmes
