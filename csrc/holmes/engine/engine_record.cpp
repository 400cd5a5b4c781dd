// What the engine tells of itself: to the flight record, and to metrics.
#include <thread>

#include "holmes/engine/engine.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

// How long the asking thread naps between looks for the answer.
constexpr auto look_pause = std::chrono::milliseconds(1);

}  // namespace

void Engine::set_identities(std::uint64_t id, std::vector<PeerIdentity> ranks) {
  std::lock_guard lock(mutex_);
  id_ = id;
  identities_ = std::move(ranks);
}

void Engine::record_call(Collective& collective, WorkState state) {
  collective.set_record(group_->recorder->add(collective.recorded_call(), state, collective.work().submitted()));
}

void Engine::record_call(P2pEngine::Request& request) {
  if (request.tag == internal_tag) return;
  request.sequence = next_p2p_++;
  request.record = group_->recorder->add(request.recorded_call(), WorkState::running, request.work->submitted());
}

void Engine::take_state() {
  DriverState state;
  state.taken = Clock::now();
  const auto room = [&] { return state.pending.size() < max_pending; };
  for (const auto& collective : queue_) {
    ++state.pending_count;
    if (!room()) continue;
    const bool is_running = front_started_ && collective == queue_.front();
    const Work& work = collective->work();
    state.pending.push_back({collective->record(), collective->recorded_call(), is_running, work.is_awaited(),
                             work.submitted(), collective->progress()});
  }
  state.pending_count += p2p_.append_pending(state.pending);
  for (int peer = 0; peer < group_->size; ++peer) {
    state.messages.push_back(p2p_.messages(peer));
    state.messages.back().is_lost = lost_[peer] != 0;
  }
  std::lock_guard lock(mutex_);
  // Submitted, but the driver is too busy to look at it.
  for (const Submission& submission : inbox_) {
    const auto* collective = std::get_if<std::unique_ptr<Collective>>(&submission);
    const auto* request = std::get_if<P2pEngine::Request>(&submission);
    if (request && request->tag == internal_tag) continue;
    ++state.pending_count;
    if (!room()) continue;
    const Work& work = collective ? (*collective)->work() : *request->work;
    state.pending.push_back({collective ? (*collective)->record() : request->record,
                             collective ? (*collective)->recorded_call() : request->recorded_call(),
                             false,
                             work.is_awaited(),
                             work.submitted(),
                             {}});
  }
  state_ = std::move(state);
  state_requested_.store(false, std::memory_order_release);
}

void Engine::request_state() {
  if (is_dead() || is_inherited()) return;
  state_requested_.store(true, std::memory_order_release);
  wake();
}

CommunicatorRecord Engine::record(Clock::time_point until) {
  CommunicatorRecord record;
  record.name = group_->name;
  record.backend = "host";
  record.rank = group_->rank;
  record.size = group_->size;
  if (is_inherited()) return record;
  // The driver answers, or else nobody drives and this thread can look itself. The dead one's state is the one it had.
  while (!is_dead() && state_requested_.load(std::memory_order_acquire)) {
    std::unique_lock drive(drive_, std::try_to_lock);
    if (drive) {
      if (!is_dead()) take_state();
      drive.unlock();
      // Whoever found the lock taken relies on its holder for what is left.
      if (has_pending()) give_to_io_thread();
      break;
    }
    if (Clock::now() >= until) break;
    std::this_thread::sleep_for(look_pause);
  }
  std::lock_guard lock(mutex_);
  record.id = id_;
  record.entered = next_sequence_;
  record.ranks = identities_;
  if (is_dead()) record.failure = failure_;
  if (is_dead() || !state_requested_.load(std::memory_order_acquire)) record.state = state_;
  record.operations = group_->recorder->operations();
  return record;
}

CommunicatorMetrics Engine::metrics() { return {group_->name, connections(), group_->recorder->totals()}; }

void Engine::hand_over() {
  if (is_inherited() || is_internal(group_->name)) return;
  std::optional<CommunicatorRecord> last;
  if (has_failed_) last = record(Clock::now());
  keep_after_end(metrics(), std::move(last));
}

}  // namespace holmes
