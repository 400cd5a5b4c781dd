#include "holmes/collectives/choose.hpp"

#include <algorithm>
#include <bit>

#include "holmes/collectives/all_reduce.hpp"
#include "holmes/collectives/bruck.hpp"
#include "holmes/collectives/chain_broadcast.hpp"
#include "holmes/collectives/exchange.hpp"
#include "holmes/collectives/gather_in_turns.hpp"
#include "holmes/collectives/reduce_scatter.hpp"

namespace holmes {
namespace {

// Whether an operation that brings so many bytes to every rank goes in log2(n) steps. Only where a message costs more
// than its bytes and its way: over sockets, with few bytes, between more than the two ranks that one step serves, and
// not on a far path, where each step would take a trip.
bool takes_log_steps(const Group& group, std::size_t received_bytes) {
  return group.size > 2 && !group.all_shared_memory && !group.is_far && received_bytes <= group.one_step_bytes();
}

// Whether what all ranks want of one root, or send to it, goes through others too. Not where there are none, and not
// where each rank copies out of the root's memory.
bool relays(const Group& group) { return group.size > 2 && !group.all_shared_memory; }

// Whether a broadcast goes from rank to rank in a chain, which carries the data once but takes a relay's time for every
// rank, or in log2(n) steps, which carry it as often.
bool pays_in_chain(const Group& group, std::size_t bytes) {
  // A relay's time in bytes. (Measured on links of 1 Gbit/s and on loopback, 4 and 8 ranks.)
  constexpr std::size_t relay_bytes = 16 * 1024;
  const auto size = static_cast<std::size_t>(group.size);
  const auto steps = static_cast<std::size_t>(std::bit_width(size - 1));
  return bytes * (steps - 1) > relay_bytes * (size - 2);
}

// So few are reduced to a root straight: in log2(n) steps every rank gets everything (measured: equal up to 8 KiB with
// 4 ranks, slower above; with 8 ranks faster up to 8 KiB).
constexpr int most_direct_ranks = 4;

// Where operations end locally, few ranks talk to the root alone: what goes through others waits for them. And so do
// all on a far path.
bool goes_straight(const Group& group, std::size_t bytes) {
  constexpr int most_ranks = 8;
  return ((group.local_completion && group.size <= most_ranks) || group.is_far) &&
         bytes * static_cast<std::size_t>(group.size - 1) <= group.one_step_bytes();
}

// Straight from the root, or to it.
std::unique_ptr<Collective> direct_broadcast(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                             Clock::time_point deadline, Buffer data) {
  const auto root = static_cast<std::size_t>(*signature.root);
  std::vector<Buffer> sends = no_data(data.dtype, group.size);
  std::vector<Buffer> recvs = sends;
  if (*signature.root == group.rank) {
    std::fill(sends.begin(), sends.end(), data);
    sends[root] = recvs[root];
  } else {
    recvs[root] = std::move(data);
  }
  return std::make_unique<Exchange>(group, signature, std::move(work), deadline, std::move(sends), std::move(recvs));
}

std::unique_ptr<Collective> direct_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                          Clock::time_point deadline, Buffer data) {
  std::vector<Buffer> inputs = no_data(data.dtype, group.size);
  Buffer output = *signature.root == group.rank ? data : inputs.front();
  inputs[static_cast<std::size_t>(*signature.root)] = std::move(data);
  return std::make_unique<ReduceScatter>(group, signature, std::move(work), deadline, std::move(output),
                                         std::move(inputs));
}

}  // namespace

ShortForm short_form(const Group& group, OpCode op, std::size_t pair_bytes) {
  if (pair_bytes > most_short_bytes) return ShortForm::none;
  if (!relays(group)) return ShortForm::one_step;
  const auto size = static_cast<std::size_t>(group.size);
  switch (op) {
    case OpCode::gather:
    case OpCode::scatter:
    case OpCode::all_to_all:
      return ShortForm::one_step;
    case OpCode::broadcast:
      if (goes_straight(group, pair_bytes)) return ShortForm::one_step;
      return pays_in_chain(group, pair_bytes) ? ShortForm::none : ShortForm::log_steps;
    case OpCode::reduce:
      return goes_straight(group, pair_bytes) || group.size <= most_direct_ranks ? ShortForm::one_step
                                                                                 : ShortForm::none;
    case OpCode::reduce_scatter:
      return pair_bytes * size <= most_short_bytes ? ShortForm::log_steps : ShortForm::none;
    case OpCode::all_gather:
    case OpCode::all_reduce:
    case OpCode::barrier:
      return takes_log_steps(group, pair_bytes * size) ? ShortForm::log_steps : ShortForm::none;
    default:
      return ShortForm::none;
  }
}

std::uint32_t digest_where_relayed(const Group& group, const std::vector<Buffer>& blocks) {
  return relays(group) ? digest_of_counts(blocks) : 0;
}

std::unique_ptr<Collective> choose_all_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                              Clock::time_point deadline, Buffer data) {
  const std::size_t one_step_bytes = data.bytes() * static_cast<std::size_t>(group.size - 1);
  if (takes_log_steps(group, one_step_bytes)) {
    Buffer output = data;
    return std::make_unique<BruckReduce>(group, signature, std::move(work), deadline, std::move(output),
                                         std::vector<Buffer>{std::move(data)}, 0);
  }
  if (one_step_bytes <= group.one_step_bytes())
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

std::unique_ptr<Collective> choose_exchange(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                            Clock::time_point deadline, std::vector<Buffer> sends,
                                            std::vector<Buffer> recvs) {
  if (signature.op == OpCode::gather && GatherInTurns::concerns(group, *signature.root, sends, recvs))
    return std::make_unique<GatherInTurns>(group, signature, std::move(work), deadline, std::move(sends),
                                           std::move(recvs));
  return std::make_unique<Exchange>(group, signature, std::move(work), deadline, std::move(sends), std::move(recvs));
}

std::unique_ptr<Collective> choose_broadcast(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                             Clock::time_point deadline, Buffer data) {
  if (!relays(group) || goes_straight(group, data.bytes()))
    return direct_broadcast(group, signature, std::move(work), deadline, std::move(data));
  if (!pays_in_chain(group, data.bytes())) {
    std::vector<Buffer> outputs = no_data(data.dtype, group.size);
    outputs[static_cast<std::size_t>(*signature.root)] = data;
    Buffer input = *signature.root == group.rank ? std::move(data) : no_data(data.dtype);
    return std::make_unique<BruckAllGather>(group, signature, std::move(work), deadline, std::move(outputs),
                                            std::move(input));
  }
  return std::make_unique<ChainBroadcast>(group, signature, std::move(work), deadline, std::move(data));
}

std::unique_ptr<Collective> choose_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                          Clock::time_point deadline, Buffer data) {
  if (!relays(group) || goes_straight(group, data.bytes()))
    return direct_reduce(group, signature, std::move(work), deadline, std::move(data));
  const std::size_t root_bytes = data.bytes() * static_cast<std::size_t>(group.size - 1);
  if (group.size > most_direct_ranks && takes_log_steps(group, root_bytes)) {
    Buffer output = *signature.root == group.rank ? data : no_data(data.dtype);
    return std::make_unique<BruckReduce>(group, signature, std::move(work), deadline, std::move(output),
                                         std::vector<Buffer>{std::move(data)}, 0);
  }
  if (root_bytes <= group.one_step_bytes())
    return direct_reduce(group, signature, std::move(work), deadline, std::move(data));
  return std::make_unique<GatherReduce>(group, signature, std::move(work), deadline, std::move(data));
}

}  // namespace holmes
