#include "holmes/collectives/choose.hpp"

#include "holmes/collectives/all_reduce.hpp"
#include "holmes/collectives/bruck.hpp"
#include "holmes/collectives/exchange.hpp"
#include "holmes/collectives/reduce_scatter.hpp"

namespace holmes {
namespace {

// Whether an operation that brings so many bytes to every rank goes in log2(n) steps. Only where a message costs more
// than its bytes: over sockets, with few bytes, and more than the two ranks that one step serves.
bool takes_log_steps(const Group& group, std::size_t received_bytes) {
  return group.size > 2 && !group.all_shared_memory && received_bytes <= group.one_step_bytes;
}

}  // namespace

std::unique_ptr<Collective> choose_all_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                              Clock::time_point deadline, Buffer data) {
  const std::size_t one_step_bytes = data.bytes() * static_cast<std::size_t>(group.size - 1);
  if (takes_log_steps(group, one_step_bytes)) {
    Buffer output = data;
    return std::make_unique<BruckReduce>(group, signature, std::move(work), deadline, std::move(output),
                                         std::vector<Buffer>{std::move(data)}, 0);
  }
  if (one_step_bytes <= group.one_step_bytes)
    return std::make_unique<OneStepAllReduce>(group, signature, std::move(work), deadline, std::move(data));
  return std::make_unique<AllReduce>(group, signature, std::move(work), deadline, std::move(data));
}

std::unique_ptr<Collective> choose_reduce_scatter(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                                  Clock::time_point deadline, Buffer output,
                                                  std::vector<Buffer> inputs) {
  // All of the input travels to everybody then, not a share.
  if (takes_log_steps(group, total_bytes(inputs) * static_cast<std::size_t>(group.size))) {
    std::size_t begin = 0;
    for (int rank = 0; rank < group.rank; ++rank) begin += inputs[static_cast<std::size_t>(rank)].count;
    return std::make_unique<BruckReduce>(group, signature, std::move(work), deadline, std::move(output),
                                         std::move(inputs), begin);
  }
  return std::make_unique<ReduceScatter>(group, signature, std::move(work), deadline, std::move(output),
                                         std::move(inputs));
}

std::unique_ptr<Collective> choose_all_gather(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                              Clock::time_point deadline, std::vector<Buffer> outputs, Buffer input) {
  if (takes_log_steps(group, total_bytes(outputs)))
    return std::make_unique<BruckAllGather>(group, signature, std::move(work), deadline, std::move(outputs),
                                            std::move(input));
  std::vector<Buffer> sends(static_cast<std::size_t>(group.size), std::move(input));
  return std::make_unique<Exchange>(group, signature, std::move(work), deadline, std::move(sends), std::move(outputs));
}

}  // namespace holmes
