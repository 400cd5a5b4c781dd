// NcclWork: an operation on a GPU. Its end is an event behind it on the communicator's stream.
#pragma once

#include "holmes/core/work.hpp"
#include "holmes/cuda/device.hpp"

namespace holmes::nccl {

// Thread-safe as Work.
class NcclWork final : public Work {
public:
  NcclWork(cuda::Device& device, cuda::Stream caller) : device_(device), caller_(caller) {}

  // The host waits.
  void wait(std::optional<Duration> timeout) override;
  void wait_stream(void* stream) override;
  void join() override { wait_stream(caller_); }

  // --- for the session ---
  // The operation is on the device, `end` behind it.
  void mark_enqueued(cuda::EventPtr end);
  // Whether the end has been reached; completes the work then. Throws SystemError where the device reports an error.
  bool poll();

private:
  cuda::EventPtr end() const;

  cuda::Device& device_;
  cuda::Stream caller_;
  mutable std::mutex end_mutex_;
  cuda::EventPtr end_;
};

}  // namespace holmes::nccl
