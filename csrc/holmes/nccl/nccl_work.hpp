// NcclWork: an operation on a GPU. Its end is an event behind it on the stream where it runs.
#pragma once

#include <functional>

#include "holmes/core/work.hpp"
#include "holmes/cuda/device.hpp"

namespace holmes::nccl {

// Thread-safe as Work.
class NcclWork final : public Work {
public:
  // `caller`: the stream that join lets wait.
  NcclWork(cuda::Device& device, cuda::Stream caller) : device_(device), caller_(caller) {}

  // The host waits. UsageError for an operation that was captured into a CUDA graph (it runs when the graph does), and
  // for one of a group that is still open.
  void wait(std::optional<Duration> timeout) override;
  void wait_stream(void* stream) override;
  // Nothing to do in a group that is still open: its end joins.
  void join() override;

  // --- for the session ---
  void set_caller(cuda::Stream caller) { caller_ = caller; }
  // The operation is on the device: on `stream`, with `end` behind it; `joined` runs when the caller's stream waits.
  void mark_enqueued(cuda::Stream stream, cuda::EventPtr end, std::function<void()> joined);
  // As mark_enqueued, into a CUDA graph.
  void mark_captured(cuda::Stream stream, cuda::EventPtr end, std::function<void()> joined);
  // Whether the end has been reached; completes the work then. Throws SystemError where the device reports an error.
  // False for good once the driver has shut down at the end of the process.
  bool poll();
  // As poll, but changes nothing; in a thread whose current device this is, and whose calls break no capture.
  bool has_ended() const;

private:
  struct Place {
    cuda::Stream stream = nullptr;
    cuda::EventPtr end;  // null: not on the device yet
    bool is_captured = false;
    std::function<void()> joined{};
  };
  Place place() const;
  // The host waits; returns where the work is final.
  void await_end(const cuda::EventPtr& end, std::optional<Duration> timeout, Clock::time_point start);

  cuda::Device& device_;
  cuda::Stream caller_;
  mutable std::mutex place_mutex_;
  Place place_;
};

}  // namespace holmes::nccl
