// EngineRecords: what an engine tells of itself to the flight record and to metrics.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "holmes/record/communicator_record.hpp"

namespace holmes {

class Engine;

// Thread-safe. Only the driver can see the state of what is pending: others ask for it and wait.
class EngineRecords final : public RecordSource {
public:
  explicit EngineRecords(Engine& engine) : engine_(engine) {}

  // What all ranks said of themselves, and the communicator's number.
  void set_identities(std::uint64_t id, std::vector<PeerIdentity> ranks);
  void request_state() override;
  CommunicatorRecord record(Clock::time_point until) override;
  CommunicatorMetrics metrics() override;

  bool is_requested() const { return requested_.load(std::memory_order_acquire); }
  // Driver. The state as it is now; none where memory is short.
  void take_state();
  // The engine is being destroyed: what remains of it.
  void keep_after_end();

private:
  Engine& engine_;
  mutable std::mutex mutex_;  // protects what follows
  std::uint64_t id_ = 0;
  std::vector<PeerIdentity> identities_;
  std::optional<DriverState> state_;  // as last asked for
  std::atomic<bool> requested_{false};
};

}  // namespace holmes
