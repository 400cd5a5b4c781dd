// Which algorithm an operation takes. It depends only on what is equal on all ranks: sizes and the group as agreed.
#pragma once

#include "holmes/collectives/collective.hpp"

namespace holmes {

// What an operation is on the wire, with so many bytes between two ranks at most and as many ranks as a short call
// takes: ShortExchange, ShortBruck, ShortTree, or none of them.
enum class ShortForm { none, one_step, log_steps, tree };
ShortForm short_form(const Group& group, OpCode op, std::size_t pair_bytes);

// Of all ranks' counts, for the Signature, where blocks may go through other ranks, who do not know whose they are; 0
// where every two ranks compare what they exchange.
std::uint32_t digest_where_relayed(const Group& group, const std::vector<Buffer>& blocks);

std::unique_ptr<Collective> choose_all_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                              Clock::time_point deadline, Buffer data);
std::unique_ptr<Collective> choose_reduce_scatter(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                                  Clock::time_point deadline, Buffer output,
                                                  std::vector<Buffer> inputs);
// Also a barrier, which gathers nothing.
std::unique_ptr<Collective> choose_all_gather(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                              Clock::time_point deadline, std::vector<Buffer> outputs, Buffer input);

// What is direct always: gather, scatter, all_to_all. `sends` and `recvs` as of Exchange.
std::unique_ptr<Collective> choose_exchange(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                            Clock::time_point deadline, std::vector<Buffer> sends,
                                            std::vector<Buffer> recvs);
// Whether a broadcast of so many bytes is a TreeBroadcast.
bool goes_along_tree(const Group& group, std::size_t broadcast_bytes);
// `data` of the root goes to all.
std::unique_ptr<Collective> choose_broadcast(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                             Clock::time_point deadline, Buffer data);
// `data` of the root becomes the reduction; the other ranks' stays as it is.
std::unique_ptr<Collective> choose_reduce(Group& group, const Signature& signature, std::shared_ptr<Work> work,
                                          Clock::time_point deadline, Buffer data);

}  // namespace holmes
