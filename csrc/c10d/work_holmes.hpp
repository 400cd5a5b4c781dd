// WorkHolmes: holmes::Work as c10d::Work.
#pragma once

#include <cstdint>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "holmes/comm/communicator.hpp"
#include "tensor_buffer.hpp"

namespace holmes::torch_backend {

// One operation, or several that finish together. Every wait on a failed one throws, again and again.
// Thread-safe once started.
class WorkHolmes final : public ::c10d::Work {
public:
  // `title` is the operation's name in the profiler, which sees it begin here.
  WorkHolmes(int rank, ::c10d::OpType type, const char* title) : ::c10d::Work(rank, type, title) {}

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
  // `timeout` zero: no other deadline than the operation's own.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Completed with the list of output tensors; its callbacks may block, they stop nobody else.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

private:
  void check_started() const;
  bool all_final() const;
  std::exception_ptr first_error() const;
  // Copies staged results to their tensors, once.
  void deliver();
  void finish_future();
  void on_all_final(std::function<void()> callback);

  std::uint64_t sequence_ = 0;
  std::vector<at::Tensor> outputs_;
  std::vector<CopyBack> copies_;
  std::once_flag delivered_;
  std::vector<WorkPtr> parts_;
  bool started_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace holmes::torch_backend
