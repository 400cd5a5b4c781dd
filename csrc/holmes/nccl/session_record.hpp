// SessionRecord: what the flight record knows of a communicator on NCCL: its operations, not what moves inside of them.
#pragma once

#include <mutex>

#include "holmes/core/types.hpp"
#include "holmes/record/communicator_record.hpp"

namespace holmes::nccl {

// Thread-safe.
class SessionRecord final : public RecordSource {
public:
  SessionRecord(std::string name, int rank, int size, std::size_t capacity);
  ~SessionRecord() override;

  // What `control`, the host-memory communicator beside it, knows of the ranks.
  void introduce(const CommunicatorRecord& control);
  // An operation begins, on the first of `buffers`; its number.
  std::uint64_t begin(const char* operation, const std::vector<Buffer>& buffers);
  void finish(std::uint64_t number, bool succeeded);
  void fail(const Failure& failure);

  void request_state() override {}
  CommunicatorRecord record(Clock::time_point until) override;
  CommunicatorMetrics metrics() override;

private:
  // With the mutex.
  DriverState state() const;

  mutable std::mutex mutex_;
  CommunicatorRecord identity_;  // without operations
  FlightRecorder recorder_;
  std::uint64_t next_p2p_ = 0;
};

}  // namespace holmes::nccl
