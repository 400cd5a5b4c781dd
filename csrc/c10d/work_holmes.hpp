// WorkHolmes: holmes::Work as c10d::Work.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "holmes/comm/communicator.hpp"
#include "tensor_buffer.hpp"

namespace holmes::torch_backend {

// One operation, or several that finish together. Every wait on a failed one throws, again and again. On a GPU, wait
// and get_future order streams and do not block the host, as ProcessGroupNCCL's: what runs after them sees the result.
// Thread-safe once started.
class WorkHolmes final : public ::c10d::Work {
public:
  // `title` is the operation's name in the profiler, which sees it begin here.
  WorkHolmes(int rank, ::c10d::OpType type, const char* title) : ::c10d::Work(rank, type, title) {}

  // Before start: the operations are on this GPU. `host_waits`: so does the host in `wait`.
  void set_device(c10::Device device, bool host_waits) {
    device_ = device;
    host_waits_ = host_waits;
  }
  // Before start: the operands of one more operation.
  void add(Operands operands);
  // Attaches the running operations; until then (inside a coalescing block) wait and get_future throw UsageError.
  void start(std::vector<WorkPtr> parts, std::uint64_t sequence);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // The current stream waits. Of CPU tensors: as the base, a kernel of torch's holds it.
  void blockCurrentStream() override;
  // `timeout` zero: no other deadline than the operation's own. A timeout makes the host wait on a GPU too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Completed with the list of output tensors; its callbacks may block, they stop nobody else. On a GPU completed at
  // once: its wait and its callbacks' streams wait for the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

private:
  void check_started() const;
  bool all_final() const;
  std::exception_ptr first_error() const;
  void wait_on_stream();
  c10::intrusive_ptr<c10::ivalue::Future> device_future();
  // Copies staged results to their tensors, once; on a GPU on the current stream.
  void deliver();
  // Completes the future, whatever happens: with the outputs, or with the error that there was on the way to them.
  void finish_future();
  void end_future(const std::exception_ptr& error, c10::IValue outputs);
  void on_all_final(std::function<void()> callback);

  std::uint64_t sequence_ = 0;
  std::vector<at::Tensor> outputs_;
  std::vector<CopyBack> copies_;
  std::once_flag delivered_;
  std::optional<c10::Event> delivered_event_;  // behind the copies on a GPU
  std::optional<c10::Device> device_;          // absent: the host waits
  bool host_waits_ = false;                    // on a GPU too
  std::vector<WorkPtr> parts_;
  bool started_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace holmes::torch_backend
