#include "holmes/engine/engine_records.hpp"

#include <thread>

#include "holmes/core/no_memory.hpp"
#include "holmes/engine/engine.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

// How long the asking thread naps between looks for the answer.
constexpr auto look_pause = std::chrono::milliseconds(1);

}  // namespace

void EngineRecords::set_identities(std::uint64_t id, std::vector<PeerIdentity> ranks) {
  std::lock_guard lock(mutex_);
  id_ = id;
  identities_ = std::move(ranks);
}

void EngineRecords::take_state() {
  std::optional<DriverState> state;
  where_memory_allows([&] { state = engine_.state(); });
  std::lock_guard lock(mutex_);
  state_.swap(state);
  requested_.store(false, std::memory_order_release);
}

void EngineRecords::request_state() {
  if (engine_.is_dead() || engine_.is_inherited()) return;
  requested_.store(true, std::memory_order_release);
  engine_.wake();
}

CommunicatorRecord EngineRecords::record(Clock::time_point until) {
  const Group& group = engine_.group();
  CommunicatorRecord record;
  record.name = group.name;
  record.backend = "host";
  record.rank = group.rank;
  record.size = group.size;
  if (engine_.is_inherited()) return record;
  // The driver answers, or else nobody drives and this thread can look itself. The dead one's state is the one it had.
  while (!engine_.is_dead() && is_requested()) {
    std::unique_lock drive(engine_.drive_lock(), std::try_to_lock);
    if (drive) {
      if (!engine_.is_dead()) take_state();
      drive.unlock();
      // Whoever found the lock taken relies on its holder for what is left.
      if (engine_.has_pending()) engine_.driver().give_to_io_thread();
      break;
    }
    if (Clock::now() >= until) break;
    std::this_thread::sleep_for(look_pause);
  }
  record.nics = totals_by_path(engine_.connections(), !engine_.is_dead());
  record.entered = engine_.operations().entered();
  record.failure = engine_.failure();
  std::lock_guard lock(mutex_);
  record.id = id_;
  record.ranks = identities_;
  if (engine_.is_dead() || !is_requested()) record.state = state_;
  record.operations = group.recorder->operations();
  return record;
}

CommunicatorMetrics EngineRecords::metrics() {
  return {engine_.group().name, engine_.connections(), engine_.group().recorder->totals(),
          engine_.group().recorder->oldest_unfinished()};
}

void EngineRecords::keep_after_end() {
  if (engine_.is_inherited() || is_internal(engine_.group().name)) return;
  std::optional<CommunicatorRecord> last;
  if (engine_.has_failed()) last = record(Clock::now());
  holmes::keep_after_end(metrics(), std::move(last));
}

}  // namespace holmes
