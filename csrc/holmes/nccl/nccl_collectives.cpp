// The operations of NcclCommunicator. What they give to NCCL is kept by value: in an open group it is called later.
#include "holmes/nccl/abi.hpp"
#include "holmes/nccl/nccl_communicator.hpp"

namespace holmes {
namespace {

nccl::Result first_error(nccl::Result a, nccl::Result b) { return a == nccl::success ? b : a; }

// Elements as NCCL counts them where it only moves them: bytes.
constexpr int byte_type = 1;  // ncclUint8

// Equal parts of one array, one after the other, as NCCL's plain collectives want them. Not where separate arrays
// happen to lie so: all ranks must come to the same answer.
bool is_one_block(const std::vector<Buffer>& buffers) {
  const Buffer& first = buffers.front();
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].owner != first.owner || buffers[i].count != first.count ||
        buffers[i].begin() != first.begin() + i * first.bytes())
      return false;
  return true;
}

}  // namespace

void NcclCommunicator::check(const char* what, const Buffer& buffer) const {
  if (buffer.device == nccl_options_.device || buffer.count == 0) return;
  throw UsageError(std::string(what) + " is in " +
                   (buffer.device ? "the memory of GPU " + std::to_string(*buffer.device) : "host memory") +
                   "; communicator '" + options_.name + "' moves the memory of GPU " +
                   std::to_string(nccl_options_.device));
}

void NcclCommunicator::check_all(const char* what, const std::vector<Buffer>& buffers, DType dtype) const {
  if (static_cast<int>(buffers.size()) != options_.size)
    throw UsageError(std::string(what) + " holds " + std::to_string(buffers.size()) + " buffers; communicator '" +
                     options_.name + "' needs one for each of its " + std::to_string(options_.size) + " ranks");
  for (const Buffer& buffer : buffers) {
    check(what, buffer);
    if (buffer.dtype != dtype)
      throw UsageError(std::string(what) + " has a buffer of " + std::string(holmes::name(buffer.dtype)) +
                       ", the other side of the call is " + std::string(holmes::name(dtype)) + "; use one dtype");
  }
}

void NcclCommunicator::check_equal_count(const char* operation, const Buffer& output, const Buffer& input) {
  if (output.count == input.count) return;
  throw UsageError(std::string(operation) + ": the output holds " + std::to_string(output.count) +
                   " elements, this rank's part of the input " + std::to_string(input.count) + "; they must be equal");
}

void NcclCommunicator::check_rank(const char* what, int value) const {
  if (value >= 0 && value < options_.size) return;
  throw UsageError(std::string(what) + " " + std::to_string(value) + " is not a rank of communicator '" +
                   options_.name + "'; it has ranks 0 to " + std::to_string(options_.size - 1));
}

int NcclCommunicator::reduction(ReduceOp op, DType dtype, const CallOptions& call) {
  const int plain = nccl::reduction_of(op, dtype);
  if (!call.premultiply) return plain;
  if (op != ReduceOp::sum || !is_floating(dtype))
    throw UsageError("premultiply is for sums of floating point, not for '" + std::string(holmes::name(op)) + "' of " +
                     std::string(holmes::name(dtype)));
  std::lock_guard lock(mutex_);
  const auto [found, is_new] = premultiplied_.try_emplace({dtype, *call.premultiply}, 0);
  if (is_new) {
    nccl::Scalar scalar(*call.premultiply, dtype);
    try {
      session_->call("making a premultiplied sum", [&, &made = found->second](nccl::Comm comm) {
        return session_->api().reduction_create_premultiplied_sum(&made, scalar.data(), *nccl::data_type_of(dtype),
                                                                  nccl::scalar_on_host, comm);
      });
    } catch (...) {
      premultiplied_.erase(found);
      throw;
    }
  }
  return found->second;
}

WorkPtr NcclCommunicator::all_reduce(Buffer data, ReduceOp op, CallOptions call) {
  check("all_reduce: the buffer", data);
  const int reduced = reduction(op, data.dtype, call);
  return run("all_reduce", {data}, call, true, [this, data, reduced](nccl::Comm comm, nccl::Stream stream) {
    return session_->api().all_reduce(data.data, data.data, data.count, *nccl::data_type_of(data.dtype), reduced, comm,
                                      stream);
  });
}

WorkPtr NcclCommunicator::reduce_scatter(Buffer output, std::vector<Buffer> inputs, ReduceOp op, CallOptions call) {
  check("reduce_scatter: the output", output);
  check_all("reduce_scatter: the input", inputs, output.dtype);
  const auto own = static_cast<std::size_t>(options_.rank);
  check_equal_count("reduce_scatter", output, inputs[own]);
  const int reduced = reduction(op, output.dtype, call);
  const int type = *nccl::data_type_of(output.dtype);
  if (is_one_block(inputs))
    return run("reduce_scatter", {output, inputs.front()}, call, true,
               [this, from = inputs.front().data, output, reduced, type](nccl::Comm comm, nccl::Stream stream) {
                 return session_->api().reduce_scatter(from, output.data, output.count, type, reduced, comm, stream);
               });
  std::vector<Buffer> held = inputs;
  held.insert(held.begin(), output);
  return run("reduce_scatter", std::move(held), call, false,
             [this, output, inputs = std::move(inputs), reduced, type](nccl::Comm comm, nccl::Stream stream) {
               const nccl::Api& api = session_->api();
               nccl::Result result = nccl::success;
               for (std::size_t root = 0; root < inputs.size(); ++root)
                 result = first_error(result, api.reduce(inputs[root].data, output.data, inputs[root].count, type,
                                                         reduced, static_cast<int>(root), comm, stream));
               return result;
             });
}

WorkPtr NcclCommunicator::all_gather(std::vector<Buffer> outputs, Buffer input, CallOptions call) {
  check("all_gather: the input", input);
  check_all("all_gather: the output", outputs, input.dtype);
  check_equal_count("all_gather", outputs[static_cast<std::size_t>(options_.rank)], input);
  if (is_one_block(outputs))
    return run("all_gather", {input, outputs.front()}, call, true,
               [this, input, to = outputs.front().data](nccl::Comm comm, nccl::Stream stream) {
                 return session_->api().all_gather(input.data, to, input.bytes(), byte_type, comm, stream);
               });
  std::vector<Buffer> held = outputs;
  held.insert(held.begin(), input);
  return run("all_gather", std::move(held), call, false,
             [this, input, outputs = std::move(outputs)](nccl::Comm comm, nccl::Stream stream) {
               const nccl::Api& api = session_->api();
               nccl::Result result = nccl::success;
               for (std::size_t root = 0; root < outputs.size(); ++root) {
                 const bool is_own = root == static_cast<std::size_t>(options_.rank);
                 const void* from = is_own ? input.data : outputs[root].data;
                 result = first_error(result, api.broadcast(from, outputs[root].data, outputs[root].bytes(), byte_type,
                                                            static_cast<int>(root), comm, stream));
               }
               return result;
             });
}

WorkPtr NcclCommunicator::broadcast(Buffer data, int root, CallOptions call) {
  check("broadcast: the buffer", data);
  check_rank("broadcast: root", root);
  return run("broadcast", {data}, call, true, [this, data, root](nccl::Comm comm, nccl::Stream stream) {
    return session_->api().broadcast(data.data, data.data, data.bytes(), byte_type, root, comm, stream);
  });
}

WorkPtr NcclCommunicator::reduce(Buffer data, int root, ReduceOp op, CallOptions call) {
  check("reduce: the buffer", data);
  check_rank("reduce: root", root);
  const int reduced = reduction(op, data.dtype, call);
  return run("reduce", {data}, call, true, [this, data, reduced, root](nccl::Comm comm, nccl::Stream stream) {
    return session_->api().reduce(data.data, data.data, data.count, *nccl::data_type_of(data.dtype), reduced, root,
                                  comm, stream);
  });
}

WorkPtr NcclCommunicator::exchange(const char* operation, std::vector<std::pair<int, Buffer>> sends,
                                   std::vector<std::pair<int, Buffer>> recvs, const CallOptions& call) {
  std::vector<Buffer> held;
  for (const auto* side : {&sends, &recvs}) {
    for (const auto& [peer, buffer] : *side) {
      check(operation, buffer);
      check_rank(operation, peer);
      held.push_back(buffer);
    }
  }
  const bool is_one_call = sends.size() + recvs.size() == 1;
  return run(operation, std::move(held), call, is_one_call,
             [this, sends = std::move(sends), recvs = std::move(recvs)](nccl::Comm comm, nccl::Stream stream) {
               const nccl::Api& api = session_->api();
               nccl::Result result = nccl::success;
               for (const auto& [peer, buffer] : sends)
                 result = first_error(result, api.send(buffer.data, buffer.bytes(), byte_type, peer, comm, stream));
               for (const auto& [peer, buffer] : recvs)
                 result = first_error(result, api.recv(buffer.data, buffer.bytes(), byte_type, peer, comm, stream));
               return result;
             });
}

WorkPtr NcclCommunicator::gather(std::vector<Buffer> outputs, Buffer input, int root, CallOptions call) {
  check_rank("gather: root", root);
  std::vector<std::pair<int, Buffer>> recvs;
  if (root == options_.rank) {
    check_all("gather: the output", outputs, input.dtype);
    check_equal_count("gather", outputs[static_cast<std::size_t>(root)], input);
    for (int peer = 0; peer < options_.size; ++peer) recvs.emplace_back(peer, outputs[static_cast<std::size_t>(peer)]);
  }
  return exchange("gather", {{root, std::move(input)}}, std::move(recvs), call);
}

WorkPtr NcclCommunicator::scatter(Buffer output, std::vector<Buffer> inputs, int root, CallOptions call) {
  check_rank("scatter: root", root);
  std::vector<std::pair<int, Buffer>> sends;
  if (root == options_.rank) {
    check_all("scatter: the input", inputs, output.dtype);
    check_equal_count("scatter", output, inputs[static_cast<std::size_t>(root)]);
    for (int peer = 0; peer < options_.size; ++peer) sends.emplace_back(peer, inputs[static_cast<std::size_t>(peer)]);
  }
  return exchange("scatter", std::move(sends), {{root, std::move(output)}}, call);
}

WorkPtr NcclCommunicator::all_to_all(std::vector<Buffer> outputs, std::vector<Buffer> inputs, CallOptions call) {
  const DType dtype = inputs.empty() ? DType::uint8 : inputs.front().dtype;
  check_all("all_to_all: the input", inputs, dtype);
  check_all("all_to_all: the output", outputs, dtype);
  const auto own = static_cast<std::size_t>(options_.rank);
  check_equal_count("all_to_all", outputs[own], inputs[own]);
  std::vector<std::pair<int, Buffer>> sends, recvs;
  for (int peer = 0; peer < options_.size; ++peer) {
    sends.emplace_back(peer, std::move(inputs[static_cast<std::size_t>(peer)]));
    recvs.emplace_back(peer, std::move(outputs[static_cast<std::size_t>(peer)]));
  }
  return exchange("all_to_all", std::move(sends), std::move(recvs), call);
}

WorkPtr NcclCommunicator::all_to_all_equal(Buffer output, Buffer input, CallOptions call) {
  check("all_to_all: the input", input);
  check("all_to_all: the output", output);
  const auto parts = static_cast<std::size_t>(options_.size);
  Buffer to_part = output, from_part = input;
  to_part.count /= parts;
  from_part.count /= parts;
  check_equal_count("all_to_all", to_part, from_part);
  if (output.dtype != input.dtype || output.count != input.count || input.count % parts != 0)
    throw UsageError("all_to_all: " + std::to_string(input.count) + " elements of " +
                     std::string(holmes::name(input.dtype)) + " to " + std::string(holmes::name(output.dtype)) +
                     " are not one dtype in equal parts for " + std::to_string(parts) + " ranks; give split sizes");
  if (session_->api().all_to_all != nullptr)
    return run("all_to_all", {output, input}, call, true,
               [this, to = output.data, from = input.data, bytes = input.bytes() / parts](nccl::Comm comm,
                                                                                          nccl::Stream stream) {
                 return session_->api().all_to_all(from, to, bytes, byte_type, comm, stream);
               });
  const auto cut = [&](const Buffer& whole) {
    std::vector<Buffer> pieces(parts, whole);
    for (std::size_t i = 0; i < parts; ++i) {
      pieces[i].count = whole.count / parts;
      pieces[i].data = whole.begin() + i * pieces[i].bytes();
    }
    return pieces;
  };
  return all_to_all(cut(output), cut(input), std::move(call));
}

WorkPtr NcclCommunicator::barrier_on(void* stream, CallOptions call) {
  if (has_open_group()) throw UsageError("barrier: it waits for all ranks, so that it cannot be part of a group");
  Buffer token = barrier_token_;
  token.stream = stream;
  const WorkPtr work = run("barrier", {token}, call, true, [this, token](nccl::Comm comm, nccl::Stream stream) {
    constexpr int sum = 0;
    return session_->api().all_reduce(token.data, token.data, 1, byte_type, sum, comm, stream);
  });
  if (!call.async) work->wait();
  return work;
}

WorkPtr NcclCommunicator::send(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return batch({{true, std::move(data), peer, tag}}, call).front();
}

WorkPtr NcclCommunicator::recv(Buffer data, int peer, std::uint32_t tag, CallOptions call) {
  return batch({{false, std::move(data), peer, tag}}, call).front();
}

WorkPtr NcclCommunicator::recv_any(Buffer, std::uint32_t, CallOptions) {
  throw UsageError("recv: NCCL cannot receive from any rank; name the source");
}

std::vector<WorkPtr> NcclCommunicator::batch(std::vector<P2pCall> calls, CallOptions call) {
  std::vector<std::pair<int, Buffer>> sends, recvs;
  int to_itself = 0;  // sends less receives
  const std::size_t count = calls.size();
  if (count == 0) return {};
  const char* operation = count > 1 ? "batch" : calls.front().is_send ? "send" : "recv";
  for (P2pCall& one : calls) {
    if (one.tag != 0)
      throw UsageError(std::string(operation) + ": tag " + std::to_string(one.tag) +
                       " is not possible, NCCL has no tags: messages of a pair match in order; leave it out");
    if (one.peer == options_.rank) to_itself += one.is_send ? 1 : -1;
    (one.is_send ? sends : recvs).emplace_back(one.peer, std::move(one.buffer));
  }
  // NCCL copies where one group has both; of an open group, whose end is still to come, it says so itself.
  if (to_itself != 0 && !has_open_group())
    throw UsageError(std::string(operation) + ": rank " + std::to_string(options_.rank) + " of communicator '" +
                     options_.name + "' cannot send to or receive from itself but with both in one batch; copy the " +
                     "buffer instead");
  const WorkPtr work = exchange(operation, std::move(sends), std::move(recvs), call);
  return std::vector<WorkPtr>(count, work);
}

}  // namespace holmes
