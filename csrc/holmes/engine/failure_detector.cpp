#include "holmes/engine/failure_detector.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "holmes/core/text.hpp"
#include "holmes/engine/io_thread.hpp"

namespace holmes {
namespace {

// How long to look for the reason after a stream ended: the abort frame of the peer may come a little later.
constexpr auto reason_grace = std::chrono::milliseconds(300);
// How long ranks have to say that they wait too.
constexpr auto probe_time = std::chrono::milliseconds(200);
// How long a rank whose peers all wait too leaves it to those beside the culprit, who know more, to name it.
constexpr auto deferral = std::chrono::seconds(1);
// In a wide group somebody answers for a rank that computes too (peer_watch.cpp), a few times a second.
constexpr auto probe_interval = std::chrono::milliseconds(200);
// How long a rank may answer nothing there, or neither wait for anybody nor go on.
constexpr auto silence = std::chrono::milliseconds(1200);
// How long who is late there leaves it to those that it waits for, who look whom they wait for themselves: some hops,
// and a silence.
constexpr auto patience = std::chrono::seconds(3);

}  // namespace

template <typename Visit>
void FailureDetector::for_each_peer(const Visit& visit) const {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && !is_lost(peer)) visit(peer, *group_.controls[peer]);
}

FailureDetector::FailureDetector(Group& group, const Operations& operations, std::string own_place)
    : group_(group),
      operations_(operations),
      own_place_(std::move(own_place)),
      controls_(::epoll_create1(EPOLL_CLOEXEC)),
      lost_(static_cast<std::size_t>(group.size)) {
  try {
    if (!controls_)
      throw SystemError("cannot make an epoll descriptor: " + errno_text(errno) + limit_text(errno),
                        {.system_errno = errno});
    for_each_peer([&](int peer, ControlConnection& control) {
      control.watch_with(controls_.get(), static_cast<std::uint32_t>(peer));
    });
  } catch (const SystemError& error) {
    // The peers, connected already, would hear of a lost rank.
    ErrorContext context = own_context();
    context.system_errno = error.context().system_errno;
    const Failure failure{error.kind(), own_place_ + ": " + error.what(), context};
    for_each_peer([&](int, ControlConnection& control) { control.send_abort(failure); });
    failure.raise();
  }
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
  if (const auto probe = control.take_probe()) {
    const auto unanswered = unanswered_peer();
    const std::string nic = unanswered ? group_.controls[*unanswered]->nic() : "";
    const WholeState whole = group_.whole ? group_.whole->state() : WholeState{};
    control.send_probe_reply({operations_.entered(), unanswered, nic, probe->number, whole});
    if (group_.whole && probe->whole) group_.whole->ask(*probe->whole, Clock::now());
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

void FailureDetector::throw_bad_memory(const StreamClosed& closed) const {
  ErrorContext context = own_context();
  context.system_errno = closed.system_errno;
  throw UsageError(own_place_ + ": memory that was given to " + operations_.describe_running() +
                       " cannot be read or written: " + errno_text(closed.system_errno) +
                       "; it was freed, unmapped or protected, or is of a mapped file that was truncated: leave what "
                       "an operation uses as it is until it ends",
                   context);
}

void FailureDetector::throw_stream_closed(const StreamClosed& closed) {
  if (closed.system_errno == EFAULT) throw_bad_memory(closed);
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
  if (has_inquiry()) return inquiry_->next_probe;
  auto next = operations_.next_deadline();
  if (next && deferred_until_) next = std::max(*next, *deferred_until_);
  return next;
}

// Who waits too, and who is waited for? In an operation of several steps, and in a chain of messages, a silent peer may
// only wait for another one.
FailureDetector::Replies FailureDetector::probe_peers() {
  Replies replies(static_cast<std::size_t>(group_.size));
  const Probe probe{++probes_, {}};
  for_each_peer([&](int, ControlConnection& control) { control.send_probe(probe); });
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
  bool late = operations_.is_late(now);
  const Collective* running = operations_.running();
  if (running && running->whole_number()) {
    if (auto failure = inquire(now, late)) return failure;
    late = false;
  }
  const std::string overdue = operations_.p2p().describe_overdue(now);
  if (!late && overdue.empty()) deferred_until_.reset();
  if ((!late && overdue.empty()) || (deferred_until_ && now < *deferred_until_)) return std::nullopt;
  const Replies replies = probe_peers();
  const auto is_silent = [&](int peer) { return !replies[static_cast<std::size_t>(peer)]; };
  const bool involves_silent = first_peer([&](int peer) { return is_silent(peer) && involves(peer); }).has_value();
  // Who answers only waits for somebody too, be it in another operation. Whose messages are late and who is answered by
  // all has nobody to leave it to: no rank is beside a culprit.
  const bool any_silent = first_peer(is_silent).has_value();
  if (!deferred_until_ && !involves_silent && !find_cut(replies) && any_silent != late) {
    deferred_until_ = now + deferral;
    return std::nullopt;
  }
  return blame(replies, late, overdue);
}

// Whom to blame: somebody silent, else the far end of a path that is cut, else somebody missing, first one with whom
// bytes are open; else one of these. (Who is silent and not waited for may just be computing.)
Failure FailureDetector::blame(const Replies& replies, bool late, const std::string& overdue) const {
  const Collective* running = operations_.running();
  std::vector<char> entered(static_cast<std::size_t>(group_.size));
  for (std::size_t peer = 0; late && peer < entered.size(); ++peer) {
    const auto& reply = replies[peer];
    const auto whole = running->whole_number();
    entered[peer] = reply && (whole ? !reply->whole.is_missing_in(*whole) : reply->entered > running->sequence());
  }
  const auto is_silent = [&](int peer) { return !replies[static_cast<std::size_t>(peer)]; };
  const auto is_missing = [&](int peer) { return late && !entered[static_cast<std::size_t>(peer)]; };
  const auto silent = first_peer([&](int peer) { return is_silent(peer) && involves(peer); });
  const auto cut = silent ? std::nullopt : find_cut(replies);
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
  if (culprit && !late && is_silent(*culprit))
    text += "; " + group_.controls[*culprit]->describe() +
            " answers nothing (it computes, or it is cut off, powered off or stopped)";
  return late_failure(std::move(text), culprit, cut);
}

Failure FailureDetector::late_failure(std::string text, const std::optional<int>& culprit,
                                      const std::optional<Cut>& cut) const {
  ErrorContext context = culprit ? context_of(*culprit) : own_context();
  if (cut) {
    const std::string near = cut->near == group_.rank ? own_place_ : group_.controls[cut->near]->describe();
    text +=
        "; nothing gets through from " + near + " to " + describe_peer(group_.label(cut->far), context.host, cut->nic);
    context.rank = group_.label(cut->near);
    context.nic = cut->nic;
  }
  return Failure{ErrorKind::timeout, text + "; raise the timeout if this is expected", context};
}

// In a wide group a rank is connected with a part of the others, and most wait for one that waits itself. So every rank
// that is asked looks whom it waits for, until one is found beside whoever has not called, or is stopped.
std::optional<Failure> FailureDetector::inquire(Clock::time_point now, bool late) {
  const Collective& running = *operations_.running();
  const std::uint64_t operation = *running.whole_number();
  auto question = group_.whole->asked_in(operation, now);
  if (late) question = {operation, group_.label(group_.rank), WholeProgress::longest_lease};
  if (!question) {
    inquiry_.reset();
    return std::nullopt;
  }
  if (!has_inquiry()) begin_inquiry(now);
  if (late && !inquiry_->late_since) inquiry_->late_since = now;
  const std::string passed =
      own_place_ + ": the deadline " + (late ? "" : "of rank " + std::to_string(question->late) + " ") + "passed in ";
  hear_replies(now);
  if (auto failure = find_missing(passed)) return failure;
  if (auto failure = find_stopped(passed, now)) return failure;
  if (late && now - *inquiry_->late_since >= patience) return blame(inquiry_->replies, late, "");
  if (now < inquiry_->next_probe) return std::nullopt;
  inquiry_->next_probe = now + probe_interval;
  const Probe probe{++probes_, question};
  for_each_peer([&](int, ControlConnection& control) { control.send_probe(probe); });
  group_.whole->hear();  // other ranks ask over other parts of this one
  return std::nullopt;
}

void FailureDetector::begin_inquiry(Clock::time_point now) {
  const Collective& running = *operations_.running();
  const auto size = static_cast<std::size_t>(group_.size);
  inquiry_ = Inquiry{.sequence = running.sequence(),
                     .operation = *running.whole_number(),
                     .begun = now,
                     .next_probe = now,
                     .first_probe = probes_ + 1,
                     .replies = Replies(size),
                     .excused_at = std::vector<Clock::time_point>(size, now)};
}

void FailureDetector::hear_replies(Clock::time_point now) {
  for_each_peer([&](int peer, ControlConnection& control) {
    const auto& reply = control.probe_reply();
    auto& known = inquiry_->replies[static_cast<std::size_t>(peer)];
    if (!reply || reply->number < inquiry_->first_probe || (known && reply->number <= known->number)) return;
    known = reply;
    if (known->whole.only_waits_in(inquiry_->operation)) inquiry_->excused_at[static_cast<std::size_t>(peer)] = now;
  });
}

// Who has called nothing, all of them; who enters before it is asked a second time is not late.
std::optional<Failure> FailureDetector::find_missing(const std::string& passed) const {
  std::string text;
  std::optional<int> culprit;
  for_each_peer([&](int peer, const ControlConnection& control) {
    const auto& reply = inquiry_->replies[static_cast<std::size_t>(peer)];
    if (!reply || reply->number == inquiry_->first_probe || !reply->whole.is_missing_in(inquiry_->operation)) return;
    add_word(text, control.describe() + ": has not entered it", "; ");
    if (!culprit) culprit = peer;
  });
  if (!culprit) return std::nullopt;
  return late_failure(passed + operations_.running()->describe() + ", waiting for " + text, culprit, std::nullopt);
}

// All that are heard have entered it, or wait before it.
std::optional<Failure> FailureDetector::find_stopped(const std::string& passed, Clock::time_point now) const {
  if (now - inquiry_->begun < silence) return std::nullopt;
  const auto cut = find_cut(inquiry_->replies);
  const auto culprit = cut ? cut->far : first_peer([&](int peer) {
    return !is_lost(peer) && involves(peer) && now - inquiry_->excused_at[static_cast<std::size_t>(peer)] >= silence;
  });
  if (!culprit) return std::nullopt;
  const auto& reply = inquiry_->replies[static_cast<std::size_t>(*culprit)];
  const bool answers = reply && reply->number + silence / probe_interval > probes_;
  std::string text = passed + operations_.running()->describe() + ", waiting for " +
                     group_.controls[static_cast<std::size_t>(*culprit)]->describe();
  if (!cut && answers) text += ": has entered it, but waits for nobody and does not go on (it computes, or hangs)";
  if (!cut && !answers) text += ": answers nothing (it is cut off, powered off or stopped)";
  return late_failure(std::move(text), culprit, cut);
}

}  // namespace holmes
