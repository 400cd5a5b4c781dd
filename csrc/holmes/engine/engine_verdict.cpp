// The engine's deadlines: what is late, who waits too, and whom to blame.
#include <algorithm>

#include "holmes/engine/engine.hpp"
#include "holmes/engine/io_thread.hpp"

namespace holmes {
namespace {

// How long ranks have to say that they wait too.
constexpr auto roll_call_time = std::chrono::milliseconds(200);
// How long a rank whose peers all wait too leaves the verdict to those beside the culprit, who know more.
constexpr auto verdict_patience = std::chrono::seconds(1);

}  // namespace

std::optional<Clock::time_point> Engine::next_deadline() const {
  std::optional<Clock::time_point> next = p2p_.next_deadline();
  for (const auto& collective : queue_)
    if (!next || collective->deadline() < *next) next = collective->deadline();
  if (next && verdict_at_) next = std::max(*next, *verdict_at_);
  return next;
}

// Who waits too, and who is waited for? In an operation of several steps, and in a chain of messages, a silent peer may
// only wait for another one.
Engine::RollCall Engine::call_roll() {
  RollCall answers(static_cast<std::size_t>(group_->size));
  const auto for_each_peer = [&](const auto& visit) {
    for (int peer = 0; peer < group_->size; ++peer)
      if (peer != group_->rank && !lost_[peer]) visit(peer, *group_->controls[peer]);
  };
  for_each_peer([](int, ControlLink& control) { control.send_roll_call(); });
  const auto end = Clock::now() + roll_call_time;
  while (true) {
    check_controls();
    bool all_answered = true;
    for_each_peer([&](int peer, ControlLink& control) {
      answers[static_cast<std::size_t>(peer)] = control.presence();
      all_answered &= control.presence().has_value();
    });
    if (all_answered || Clock::now() >= end) return answers;
    std::vector<pollfd> fds;
    for_each_peer([&](int, ControlLink& control) { control.append_fds(fds); });
    poll_until(fds, end);
  }
}

std::optional<int> Engine::unanswered_peer() const {
  for (int peer = 0; peer < group_->size; ++peer)
    if (peer != group_->rank && !lost_[peer] &&
        (group_->channels[peer]->is_unanswered() || p2p_.channels()[peer]->is_unanswered()))
      return peer;
  return std::nullopt;
}

std::optional<Engine::Cut> Engine::find_cut(const RollCall& answers) const {
  if (const auto peer = unanswered_peer()) return Cut{group_->rank, *peer, group_->controls[*peer]->nic()};
  for (int peer = 0; peer < group_->size; ++peer) {
    const auto& answer = answers[static_cast<std::size_t>(peer)];
    if (!answer || !answer->unanswered || *answer->unanswered == peer || *answer->unanswered >= group_->size) continue;
    if (*answer->unanswered == group_->rank) return Cut{group_->rank, peer, answer->nic};
    return Cut{peer, *answer->unanswered, answer->nic};
  }
  return std::nullopt;
}

void Engine::check_deadlines() try {
  const auto now = Clock::now();
  if (is_dead()) return;
  const bool late = std::any_of(queue_.begin(), queue_.end(), [&](const auto& op) { return op->deadline() <= now; });
  const std::string overdue = p2p_.describe_overdue(now);
  if (!late && overdue.empty()) verdict_at_.reset();
  if ((!late && overdue.empty()) || (verdict_at_ && now < *verdict_at_)) return;
  const RollCall answers = call_roll();
  const auto is_silent = [&](int peer) { return !answers[static_cast<std::size_t>(peer)]; };
  std::vector<char> entered(static_cast<std::size_t>(group_->size));
  for (std::size_t peer = 0; late && peer < entered.size(); ++peer)
    entered[peer] = answers[peer].value_or(Presence{}).entered > queue_.front()->sequence();
  const auto is_missing = [&](int peer) { return late && !entered[static_cast<std::size_t>(peer)]; };
  const auto first_peer = [&](const auto& is_wanted) {
    for (int peer = 0; peer < group_->size; ++peer)
      if (peer != group_->rank && is_wanted(peer)) return std::optional(peer);
    return std::optional<int>();
  };
  const auto silent = first_peer([&](int peer) { return is_silent(peer) && involves(peer); });
  const auto cut = silent ? std::nullopt : find_cut(answers);
  // Who answers only waits for somebody too, be it in another operation.
  if (!verdict_at_ && !silent && !cut && !first_peer([&](int peer) { return is_silent(peer) && late; })) {
    verdict_at_ = now + verdict_patience;
    return;
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
    text += queue_.front()->describe() + ", waiting for " + queue_.front()->describe_wait(entered);
  else
    text += "communicator '" + group_->name + "': " + overdue;
  ErrorContext context{.rank = group_->label(group_->rank), .peer = {}, .host = {}, .nic = {}, .system_errno = {}};
  if (culprit) {
    context = context_of(*culprit);
    if (!late && is_silent(*culprit)) text += "; " + group_->controls[*culprit]->describe() + " gives no sign of life";
  }
  if (cut) {
    const std::string near = cut->near == group_->rank ? own_place_ : group_->controls[cut->near]->describe();
    text +=
        "; nothing gets through from " + near + " to " + describe_peer(group_->label(cut->far), context.host, cut->nic);
    context.rank = group_->label(cut->near);
    context.nic = cut->nic;
  }
  fail({ErrorKind::timeout, text + "; raise the timeout if this is expected", context});
} catch (const HolmesError& error) {
  fail(failure_of(error));  // a peer told first what is wrong
}

}  // namespace holmes
