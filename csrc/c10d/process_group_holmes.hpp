// ProcessGroupHolmes: a Communicator as the c10d backend "holmes".
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "device_communicators.hpp"
#include "holmes/comm/communicator.hpp"
#include "sparse.hpp"
#include "tensor_buffer.hpp"
#include "torch_error.hpp"
#include "work_holmes.hpp"

namespace holmes::torch_backend {

using ::c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using TorchWork = c10::intrusive_ptr<::c10d::Work>;

// What torch copies for the groups that it splits from one (copy.deepcopy of `options`).
class HolmesOptions final : public ::c10d::Backend::Options {
public:
  using Options::Options;
};

struct Habits {
  bool host_waits = false;   // a wait for an operation on a GPU makes the host wait too
  bool refuses_nan = false;  // what an operation reads is looked at for NaN first, which is an error
};

// CPU tensors over one Communicator, CUDA tensors over NCCL on the NICs that `devices` gives it
// (device_communicators.hpp). On CPU tensors operations with `asyncOp` false run in the calling thread and are done on
// return; the others, and send and receive (c10d does not tell their two forms apart), run in the engine. Thread-safe;
// each thread has its own coalescing block.
class ProcessGroupHolmes final : public ::c10d::Backend {
public:
  using StorePtr = c10::intrusive_ptr<::c10d::Store>;
  using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;
  // Makes the group of this one's ranks `members`, this rank among them. Collective over them. Second: whether its
  // NCCL communicator is to be split from this group's, in which all ranks of this group then take part.
  using Split =
      std::function<std::pair<c10::intrusive_ptr<ProcessGroupHolmes>, bool>(const std::vector<int>&, Duration timeout)>;

  // Collective over the group: connects it. `global_ranks` and `nic_reason` are only information.
  ProcessGroupHolmes(StorePtr store, CommunicatorOptions options, std::vector<std::uint64_t> global_ranks,
                     std::string nic_reason, DeviceCommunicators::Make make_device = nullptr, Split split = nullptr,
                     Habits habits = {});
  ~ProcessGroupHolmes() override;

  // Throws CommunicatorError after shutdown.
  std::shared_ptr<Communicator> communicator() const;

  const DeviceCommunicators& devices() const { return devices_; }
  const SparseReducer& sparse() const { return sparse_; }

  // Why the group is on these NICs.
  const std::string& nic_reason() const { return nic_reason_; }

  const std::string getBackendName() const override { return "holmes"; }
  // A copy: torch writes a new group's name and timeout into what it gets.
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<HolmesOptions>(*options_); }
  bool supportsCoalescing() const override { return true; }
  // torch connects eagerly (init_process_group(device_id=...)) where a backend says so.
  bool supportsSplitting() const override { return devices_.can_make(); }
  // Collective over `ranks`, in ascending order; null on all others, which need not call it. torch calls it for each
  // device, with one store, and gets one group.
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& options) override;
  // A rank's part in a split of the group's NCCL communicator from which it gets nothing. Collective over the group,
  // with the others' split.
  void stay_out_of_split();
  // Registers this memory of the group's GPU with its NCCL communicator, which may then move it without copies;
  // symmetric: docs/nccl.md. What is registered already stays so. Throws UsageError where the group has no NCCL
  // communicator yet.
  void register_memory(void* address, std::size_t bytes, bool is_symmetric);
  // Does nothing for memory that is not registered.
  void deregister_memory(void* address);
  // Collective: the group's communicator on `device`, which its first operation would make.
  void eagerConnectSingleDevice(at::Device device) override;
  // Whether other ranks of the group can read CPU tensors of this one where they are. FSDP2 asks before each
  // collective, and then for what it sends. (torch tells the index of a device alone: -1 is the host's.)
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0 && shares_memory_; }
  // `count` elements for the group's operations: zeros in shared memory (SharedBuffer), as long as the tensor lives;
  // ordinary memory where they are few, on a GPU, or the system gives no shared memory. Local.
  at::Tensor allocateTensor(long count, at::TensorOptions options) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // counted from 0 on every rank
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  ::c10d::ErrorType getError() override;
  void abort() override;
  // Waits for what is pending, until nothing has moved for 10 s; what is left is aborted, here and on the peers.
  void shutdown() override;
  void startCoalescing() override;
  TorchWork endCoalescing() override;
  // Ends this thread's block, if there is one, without what waits for its end. What has started goes on.
  void drop_coalescing();

  TorchWork broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  // Of a sparse COO tensor too (sparse.hpp), as Gloo's; so does allreduce_sparse, of all others as well.
  TorchWork allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  TorchWork allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  TorchWork allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) override;
  TorchWork reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  TorchWork allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  TorchWork _allgather_base(at::Tensor& output, at::Tensor& input, const ::c10d::AllgatherOptions& opts) override;
  TorchWork allgather_coalesced(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) override;
  TorchWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const ::c10d::AllgatherOptions& opts) override;
  TorchWork gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) override;
  TorchWork scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) override;
  TorchWork reduce_scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const ::c10d::ReduceScatterOptions& opts) override;
  TorchWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                          std::vector<std::int64_t>& input_splits, const ::c10d::AllToAllOptions& opts) override;
  TorchWork alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  TorchWork barrier(const ::c10d::BarrierOptions& opts) override;
  // Goes through the store, so that it works where the group is stuck and leaves the group usable. Every rank that
  // arrived throws TimeoutError naming all that did not (`wait_all_ranks` is always done).
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  TorchWork send(Tensors& tensors, int peer, int tag) override;
  TorchWork recv(Tensors& tensors, int peer, int tag) override;
  TorchWork recvAnysource(Tensors& tensors, int tag) override;

private:
  // A coalescing block: sends and receives are collected and start together at its end; collectives start in order.
  struct Batch {
    c10::intrusive_ptr<WorkHolmes> work;
    std::vector<P2pCall> calls;
    std::vector<WorkPtr> started;
    // On a GPU all of the block is one group of each of these: one, where it does not mix collectives and messages.
    std::vector<std::shared_ptr<NcclCommunicator>> device_groups{};
    bool is_async = false;  // some operation of a GPU is: then all run beside the current stream
    void open_group(const std::shared_ptr<NcclCommunicator>& communicator);
  };

  ErrorContext here() const;
  Duration timeout_or_default(std::chrono::milliseconds timeout) const;
  CallOptions message_options() const { return {.timeout = timeout_or_default(::c10d::kUnsetTimeout), .async = true}; }
  Batch* batch_of_this_thread();
  static c10::Device device_of(const at::Tensor& tensor);
  // Of a collective on `device`; opens the block's group there.
  std::shared_ptr<Communicator> communicator_on(c10::Device device, Batch* batch);
  // Adds a message of a GPU to a block. The first one of a group that was not used before is collective over the ranks
  // of the cluster that have such messages in their blocks, also where these go to other clusters.
  void add_device_message(Batch& batch, c10::Device device, bool is_send, Buffer buffer, int peer, std::uint32_t tag);
  // Whether messages of tensors on `device` to and from `peer` are the host communicator's: those between clusters are,
  // where the copy engine moves a GPU's memory and no kernel takes part in it.
  bool is_host_message(c10::Device device, int peer) const;
  WorkPtr start_message(Communicator& communicator, bool is_send, Buffer buffer, int to, std::uint32_t tag) const;
  TorchWork point_to_point(OpType type, const char* title, at::Tensor& tensor, bool is_send, int peer, int tag);
  // Whether rank `rank`'s process arrived, as a store key.
  std::string arrival_key(std::uint64_t round, int rank) const;

  // Runs `body(operands, communicator, call)`, which returns a vector of works, as one c10d operation on the device of
  // `first`, one of its tensors (undefined: the host).
  template <typename Opts, typename Body>
  TorchWork run(OpType type, const char* title, const Opts& opts, const at::Tensor& first, Body&& body) {
    return translated([&]() -> TorchWork {
      Batch* batch = batch_of_this_thread();
      const c10::Device device = device_of(first);
      CallOptions call;
      call.timeout = timeout_or_default(opts.timeout);
      call.async = opts.asyncOp || batch != nullptr;
      Operands operands(device);  // refuses other devices first
      if (habits_.refuses_nan) operands.refuse_nan();
      const auto communicator = communicator_on(device, batch);
      if (!device.is_cpu() && batch != nullptr) {
        batch->is_async |= opts.asyncOp;
        body(operands, *communicator, call);  // starts with the block
        batch->work->set_device(device, habits_.host_waits);
        batch->work->add(std::move(operands));
        return batch->work;
      }
      auto work = c10::make_intrusive<WorkHolmes>(rank_, type, title);
      if (!device.is_cpu()) work->set_device(device, habits_.host_waits);
      std::vector<WorkPtr> parts = body(operands, *communicator, call);
      work->add(std::move(operands));
      if (batch != nullptr) batch->started.insert(batch->started.end(), parts.begin(), parts.end());
      // A message has no number: TORCH_DISTRIBUTED_DEBUG=DETAIL compares the numbers of ranks that have no part in it.
      work->start(std::move(parts), type == OpType::RECVANYSOURCE ? sequence_.load() : sequence_++);
      if (!call.async) work->wait();  // all of them are final: raises their error, delivers staged results
      return work;
    });
  }

  // A list of operations, which `start(i)` starts with `call`; on a GPU as one, which NCCL launches together; in a
  // coalescing block they are part of its.
  template <typename Start>
  static std::vector<WorkPtr> together(Communicator& communicator, CallOptions& call, std::size_t length,
                                       Start&& start) {
    const auto start_all = [&] {
      std::vector<WorkPtr> works;
      for (std::size_t i = 0; i < length; ++i) {
        call.in_list = {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(length)};
        works.push_back(start(i));
      }
      return works;
    };
    if (!communicator.device()) return start_all();
    auto& nccl = static_cast<NcclCommunicator&>(communicator);
    if (nccl.has_open_group()) return start_all();
    nccl.start_group();
    try {
      start_all();
    } catch (...) {
      nccl.abandon_group();
      throw;
    }
    return {nccl.end_group(call)};
  }

  const StorePtr store_;
  const std::string name_;
  const std::string nic_reason_;
  const Habits habits_;
  bool shares_memory_ = false;   // with another rank of the group
  std::vector<int> neighbours_;  // the ranks of this one's cluster, itself included, in ascending order
  c10::intrusive_ptr<HolmesOptions> options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::uint64_t> barrier_round_{0};
  DeviceCommunicators devices_;
  SparseReducer sparse_;
  const Split split_;
  mutable std::mutex mutex_;  // guards what follows
  std::shared_ptr<Communicator> communicator_;
  std::map<std::thread::id, Batch> batches_;
  StorePtr last_split_store_;
  c10::weak_intrusive_ptr<::c10d::Backend> last_split_{BackendPtr()};
  struct Registered {
    void* handle;
    bool is_symmetric;
  };
  std::map<void*, Registered> registered_;  // by address
};

}  // namespace holmes::torch_backend
