#include "holmes/collectives/choose.hpp"

#include <algorithm>
#include <bit>

#include "holmes/collectives/all_reduce.hpp"
#include "holmes/collectives/bruck.hpp"
#include "holmes/collectives/chain_broadcast.hpp"
#include "holmes/collectives/exchange.hpp"
#include "holmes/collectives/gather_in_turns.hpp"
#include "holmes/collectives/reduce_scatter.hpp"
#include "holmes/collectives/tree_broadcast.hpp"

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

// Whether the root may exchange so much with each other rank in one step.
bool takes_one_step(const Group& group, std::size_t bytes) {
  return bytes * static_cast<std::size_t>(group.size - 1) <= group.one_step_bytes();
}

// How a broadcast goes. Where operations end locally, a tree is as good as log2(n) steps and tells nobody of those that
// are not beside it; on a far path, each of its steps would be a trip.
enum class BroadcastWay { straight, in_chain, along_tree, in_log_steps };

BroadcastWay way_of_broadcast(const Group& group, std::size_t bytes) {
  if (!relays(group) || (group.is_far && takes_one_step(group, bytes))) return BroadcastWay::straight;
  if (pays_in_chain(group, bytes)) return BroadcastWay::in_chain;
  return group.local_completion ? BroadcastWay::along_tree : BroadcastWay::in_log_steps;
}

// Whether a reduce goes straight to the root: where operations end locally, few ranks talk to it alone, as what goes
// through others waits for them (and the order of sums lets no tree have less to carry); and so do all on a far path.
bool reduces_straight(const Group& group, std::size_t bytes) {
  constexpr int most_ranks = 8;
  if (!relays(group)) return true;
  return ((group.local_completion && group.size <= most_ranks) || group.is_far) && takes_one_step(group, bytes);
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

// As an all_gather to which only the root contributes.
std::unique_ptr<Collective> stepwise_broadcast(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                               Clock::time_point deadline, Buffer data) {
  std::vector<Buffer> outputs = no_data(data.dtype, group.size);
  outputs[static_cast<std::size_t>(*signature.root)] = data;
  Buffer input = *signature.root == group.rank ? std::move(data) : no_data(data.dtype);
  return std::make_unique<BruckAllGather>(group, signature, std::move(work), deadline, std::move(outputs),
                                          std::move(input));
}

std::unique_ptr<Collective> direct_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                          Clock::time_point deadline, Buffer data) {
  std::vector<Buffer> inputs = no_data(data.dtype, group.size);
  Buffer output = *signature.root == group.rank ? data : inputs.front();
  inputs[static_cast<std::size_t>(*signature.root)] = std::move(data);
  return std::make_unique<ReduceScatter>(group, signature, std::move(work), deadline, std::move(output),
                                         std::move(inputs));
}

ShortForm short_form(BroadcastWay way) {
  switch (way) {
    case BroadcastWay::straight:
      return ShortForm::one_step;
    case BroadcastWay::along_tree:
      return ShortForm::tree;
    case BroadcastWay::in_log_steps:
      return ShortForm::log_steps;
    case BroadcastWay::in_chain:
      return ShortForm::none;
  }
  return ShortForm::none;
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
      return short_form(way_of_broadcast(group, pair_bytes));
    case OpCode::reduce:
      return reduces_straight(group, pair_bytes) || group.size <= most_direct_ranks ? ShortForm::one_step
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

bool goes_along_tree(const Group& group, std::size_t broadcast_bytes) {
  return way_of_broadcast(group, broadcast_bytes) == BroadcastWay::along_tree;
}

std::unique_ptr<Collective> choose_broadcast(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                             Clock::time_point deadline, Buffer data) {
  switch (way_of_broadcast(group, data.bytes())) {
    case BroadcastWay::straight:
      return direct_broadcast(group, signature, std::move(work), deadline, std::move(data));
    case BroadcastWay::in_log_steps:
      return stepwise_broadcast(group, signature, std::move(work), deadline, std::move(data));
    case BroadcastWay::along_tree:
      return std::make_unique<TreeBroadcast>(group, signature, std::move(work), deadline, std::move(data));
    case BroadcastWay::in_chain:
      break;
  }
  return std::make_unique<ChainBroadcast>(group, signature, std::move(work), deadline, std::move(data));
}

std::unique_ptr<Collective> choose_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                          Clock::time_point deadline, Buffer data) {
  if (reduces_straight(group, data.bytes()))
    return direct_reduce(group, signature, std::move(work), deadline, std::move(data));
  if (group.size > most_direct_ranks &&
      takes_log_steps(group, data.bytes() * static_cast<std::size_t>(group.size - 1))) {
    Buffer output = *signature.root == group.rank ? data : no_data(data.dtype);
    return std::make_unique<BruckReduce>(group, signature, std::move(work), deadline, std::move(output),
                                         std::vector<Buffer>{std::move(data)}, 0);
  }
  if (takes_one_step(group, data.bytes()))
    return direct_reduce(group, signature, std::move(work), deadline, std::move(data));
  return std::make_unique<GatherReduce>(group, signature, std::move(work), deadline, std::move(data));
}

}  // namespace holmes
