// SparseReducer: all_reduce of sparse COO tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "background.hpp"
#include "holmes/comm/communicator.hpp"

namespace holmes::torch_backend {

// The ranks' elements may be others, and any number of them. Who has how many is told over the group's communicator, in
// the order of its other operations; indices and values follow over one of its own, which the first call makes, as
// their sizes are known only then and other operations may have been called meanwhile. Sums are taken in rank order, so
// that all ranks have the same bits. Thread-safe.
class SparseReducer {
public:
  // Collective, may block: makes the communicator of its own.
  using Make = std::function<std::shared_ptr<Communicator>()>;

  explicit SparseReducer(Make make) : state_(std::make_shared<State>(std::move(make))) {}
  // Operations that are left fail.
  ~SparseReducer() { close("it was destroyed with operations pending"); }

  // `tensor` (CPU, its size the same on all ranks) becomes the sum or average over all ranks, coalesced. `comm` is the
  // group's. The work ends in MismatchError on all ranks where sizes, dtypes or reductions differ; the group stays
  // usable. Throws UsageError for other reductions and for dtypes that have none.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, Communicator& comm, const CallOptions& call);

  // Null before the first call and after close.
  std::shared_ptr<Communicator> communicator() const { return state_->get(); }
  // As Communicator::abort, of the operations under way.
  void abort(const std::string& reason);
  // Aborts what is under way, lets go of the communicator.
  void close(const std::string& reason);

private:
  struct Call;
  // Shared with tasks that outlive this.
  struct State {
    explicit State(Make make) : make(std::move(make)) {}
    std::shared_ptr<Communicator> get() const;
    std::shared_ptr<Communicator> get_or_make();
    const Make make;
    mutable std::mutex mutex;
    std::shared_ptr<Communicator> communicator;
    std::string closed_because;  // empty: open
  };
  static void finish(const std::shared_ptr<State>& state, Call& call);

  const std::shared_ptr<State> state_;
  SerialQueue queue_;
};

}  // namespace holmes::torch_backend
