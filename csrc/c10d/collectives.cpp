// The collectives of ProcessGroupHolmes: c10d's forms of each, on the communicator's one form.
#include "process_group_holmes.hpp"

namespace holmes::torch_backend {
namespace {

// One part: the works of most operations.
std::vector<WorkPtr> one(WorkPtr work) { return {std::move(work)}; }

at::Tensor first_of(const Tensors& tensors) { return tensors.empty() ? at::Tensor() : tensors.front(); }

template <typename T>
T& only(std::vector<T>& items, const char* what) {
  if (items.size() != 1)
    throw UsageError(std::string(what) + " has " + std::to_string(items.size()) +
                     " entries; Holmes takes exactly one (one device per process)");
  return items.front();
}

// Sets `call.premultiply` where torch's reduction has a factor. Call it before `call` is passed on: arguments are
// evaluated in any order.
ReduceOp reduce_op(const ::c10d::ReduceOp& op, const Communicator& comm, CallOptions& call) {
  switch (op.op_) {
    case ::c10d::ReduceOp::SUM:
      return ReduceOp::sum;
    case ::c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case ::c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case ::c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case ::c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case ::c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case ::c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case ::c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    case ::c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = static_cast<const ::c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (!comm.device() || factor == nullptr)
        throw UsageError("ReduceOp.PREMUL_SUM is for CUDA tensors; multiply the tensor and use ReduceOp.SUM");
      call.premultiply = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>() : factor->double_factor;
      return ReduceOp::sum;
    }
    default:
      throw UsageError("ReduceOp " + std::to_string(static_cast<int>(op.op_)) + " is not supported");
  }
}

// Torch itself passes the parts of complex numbers to all_reduce; for reduce and reduce_scatter it leaves it to the
// backend.
Payload payload_of(const ::c10d::ReduceOp& op) {
  const bool sums = op == ::c10d::ReduceOp::SUM || op == ::c10d::ReduceOp::AVG || op == ::c10d::ReduceOp::PREMUL_SUM;
  return sums ? Payload::sum : Payload::reduce;
}

void check_length(std::size_t length, int size, const char* what) {
  if (length != static_cast<std::size_t>(size))
    throw UsageError(std::string(what) + " has " + std::to_string(length) + " tensors; give one per rank, " +
                     std::to_string(size));
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, const char* what) {
  if (outputs.size() != inputs.size())
    throw UsageError(std::string(what) + " got " + std::to_string(outputs.size()) + " outputs and " +
                     std::to_string(inputs.size()) + " inputs; give as many of one as of the other");
}

}  // namespace

TorchWork ProcessGroupHolmes::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) {
  return run(OpType::BROADCAST, "holmes:broadcast", opts, first_of(tensors),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer data = operands.in_place(only(tensors, "broadcast's tensor list"));
               return one(comm.broadcast(data, static_cast<int>(opts.rootRank), call));
             });
}

TorchWork ProcessGroupHolmes::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  return run(OpType::ALLREDUCE, "holmes:all_reduce", opts, first_of(tensors),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const at::Tensor& tensor = only(tensors, "all_reduce's tensor list");
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               if (tensor.defined() && tensor.layout() == at::kSparse && tensor.is_cpu()) {
                 operands.written.push_back(tensor);
                 return one(sparse_.all_reduce(tensor, op, comm, call));
               }
               const Buffer data = operands.in_place(tensor, Payload::reduce);
               return one(comm.all_reduce(data, op, call));
             });
}

TorchWork ProcessGroupHolmes::allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

TorchWork ProcessGroupHolmes::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& opts) {
  return run(OpType::ALLREDUCE_COALESCED, "holmes:all_reduce_coalesced", opts, first_of(tensors),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               const auto list = operands.in_place(tensors, Payload::reduce);
               return together(comm, call, list.size(),
                               [&](std::size_t i) { return comm.all_reduce(list[i], op, call); });
             });
}

TorchWork ProcessGroupHolmes::reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) {
  return run(OpType::REDUCE, "holmes:reduce", opts, first_of(tensors),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const at::Tensor& tensor = only(tensors, "reduce's tensor list");
               const Payload payload = payload_of(opts.reduceOp);
               const Buffer data =
                   opts.rootRank == rank_ ? operands.in_place(tensor, payload) : operands.input(tensor, payload);
               operands.written = {tensor};  // what the work's future has, on every rank as Gloo's
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               return one(comm.reduce(data, static_cast<int>(opts.rootRank), op, call));
             });
}

TorchWork ProcessGroupHolmes::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& opts) {
  return run(OpType::ALLGATHER, "holmes:all_gather", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Tensors& list = only(outputs, "all_gather's list of output lists");
               check_length(list.size(), size_, "all_gather's output list");
               const Buffer input = operands.input(only(inputs, "all_gather's input list"));
               return one(comm.all_gather(operands.outputs(list), input, call));
             });
}

TorchWork ProcessGroupHolmes::_allgather_base(at::Tensor& output, at::Tensor& input,
                                              const ::c10d::AllgatherOptions& opts) {
  return run(OpType::_ALLGATHER_BASE, "holmes:all_gather_into_tensor", opts, input,
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer source = operands.input(input);
               auto targets = equal_pieces(operands.output(output), size_, "the output of all_gather_into_tensor");
               return one(comm.all_gather(std::move(targets), source, call));
             });
}

TorchWork ProcessGroupHolmes::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                  const ::c10d::AllgatherOptions& opts) {
  return run(OpType::ALLGATHER_COALESCED, "holmes:all_gather_coalesced", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               check_length(outputs.size(), size_, "all_gather_coalesced's list of output lists");
               for (const Tensors& list : outputs) check_pairs(list, inputs, "all_gather_coalesced");
               return together(comm, call, inputs.size(), [&](std::size_t i) {
                 std::vector<Buffer> targets;
                 for (const Tensors& list : outputs) targets.push_back(operands.output(list[i]));
                 return comm.all_gather(std::move(targets), operands.input(inputs[i]), call);
               });
             });
}

TorchWork ProcessGroupHolmes::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const ::c10d::AllgatherOptions& opts) {
  return run(OpType::COALESCED, "holmes:all_gather_into_tensor_coalesced", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
               return together(comm, call, inputs.size(), [&](std::size_t i) {
                 auto targets = equal_pieces(operands.output(outputs[i]), size_, "an output of all_gather_into_tensor");
                 return comm.all_gather(std::move(targets), operands.input(inputs[i]), call);
               });
             });
}

TorchWork ProcessGroupHolmes::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& opts) {
  return run(OpType::GATHER, "holmes:gather", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer input = operands.input(only(inputs, "gather's input list"));
               std::vector<Buffer> targets;
               if (opts.rootRank == rank_) {
                 const Tensors& list = only(outputs, "gather's list of output lists");
                 check_length(list.size(), size_, "gather's output list");
                 targets = operands.outputs(list);
               }
               return one(comm.gather(std::move(targets), input, static_cast<int>(opts.rootRank), call));
             });
}

TorchWork ProcessGroupHolmes::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& opts) {
  return run(OpType::SCATTER, "holmes:scatter", opts, first_of(outputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer output = operands.output(only(outputs, "scatter's output list"));
               std::vector<Buffer> sources;
               if (opts.rootRank == rank_) {
                 const Tensors& list = only(inputs, "scatter's list of input lists");
                 check_length(list.size(), size_, "scatter's input list");
                 sources = operands.inputs(list);
               }
               return one(comm.scatter(output, std::move(sources), static_cast<int>(opts.rootRank), call));
             });
}

TorchWork ProcessGroupHolmes::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                             const ::c10d::ReduceScatterOptions& opts) {
  return run(OpType::REDUCE_SCATTER, "holmes:reduce_scatter", opts, first_of(outputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Tensors& list = only(inputs, "reduce_scatter's list of input lists");
               check_length(list.size(), size_, "reduce_scatter's input list");
               const at::Tensor& result = only(outputs, "reduce_scatter's output list");
               const Buffer output = operands.output(result, payload_of(opts.reduceOp));
               auto sources = operands.inputs(list, payload_of(opts.reduceOp));
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               return one(comm.reduce_scatter(output, std::move(sources), op, call));
             });
}

TorchWork ProcessGroupHolmes::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                   const ::c10d::ReduceScatterOptions& opts) {
  return run(OpType::_REDUCE_SCATTER_BASE, "holmes:reduce_scatter_tensor", opts, input,
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer target = operands.output(output, payload_of(opts.reduceOp));
               auto sources = equal_pieces(operands.input(input, payload_of(opts.reduceOp)), size_,
                                           "the input of reduce_scatter_tensor");
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               return one(comm.reduce_scatter(target, std::move(sources), op, call));
             });
}

TorchWork ProcessGroupHolmes::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                              const ::c10d::ReduceScatterOptions& opts) {
  return run(OpType::COALESCED, "holmes:reduce_scatter_tensor_coalesced", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced");
               const ReduceOp op = reduce_op(opts.reduceOp, comm, call);
               return together(comm, call, inputs.size(), [&](std::size_t i) {
                 const Buffer target = operands.output(outputs[i], payload_of(opts.reduceOp));
                 auto sources = equal_pieces(operands.input(inputs[i], payload_of(opts.reduceOp)), size_,
                                             "an input of reduce_scatter_tensor");
                 return comm.reduce_scatter(target, std::move(sources), op, call);
               });
             });
}

TorchWork ProcessGroupHolmes::alltoall_base(at::Tensor& output, at::Tensor& input,
                                            std::vector<std::int64_t>& output_splits,
                                            std::vector<std::int64_t>& input_splits,
                                            const ::c10d::AllToAllOptions& opts) {
  return run(OpType::ALLTOALL_BASE, "holmes:all_to_all_single", opts, input,
             [&](Operands& operands, Communicator& comm, auto& call) {
               const Buffer source = operands.input(input);
               const Buffer target = operands.output(output);
               if (comm.device() && output_splits.empty() && input_splits.empty())
                 return one(static_cast<NcclCommunicator&>(comm).all_to_all_equal(target, source, call));
               auto targets = pieces(target, split_counts(output, output_splits, size_, "all_to_all's output"));
               auto sources = pieces(source, split_counts(input, input_splits, size_, "all_to_all's input"));
               return one(comm.all_to_all(std::move(targets), std::move(sources), call));
             });
}

TorchWork ProcessGroupHolmes::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) {
  return run(OpType::ALLTOALL, "holmes:all_to_all", opts, first_of(inputs),
             [&](Operands& operands, Communicator& comm, auto& call) {
               check_length(outputs.size(), size_, "all_to_all's output list");
               check_length(inputs.size(), size_, "all_to_all's input list");
               return one(comm.all_to_all(operands.outputs(outputs), operands.inputs(inputs), call));
             });
}

}  // namespace holmes::torch_backend
