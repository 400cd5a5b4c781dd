#include "holmes/collectives/reduce_scatter.hpp"

#include <algorithm>

#include "holmes/reduce/copy.hpp"

namespace holmes {

ReduceScatter::ReduceScatter(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                             Buffer output, std::vector<Buffer> inputs)
    : ReducingCollective(
          group, signature, std::move(work), deadline,
          SliceReducer(group, inputs[group.rank].begin(), output.begin(), inputs[group.rank].count, signature.dtype,
                       *signature.reduction, signature.average_over.value_or(group.size),
                       output.bytes() >= cache_bypass_bytes, group.slice_bytes)),
      output_(std::move(output)),
      inputs_(std::move(inputs)) {}

iovec ReduceScatter::next_send(int peer, std::size_t done_bytes) {
  return {inputs_[peer].begin() + done_bytes, inputs_[peer].bytes() - done_bytes};
}

// The root's own block is empty.
GatherReduce::GatherReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                           Buffer data)
    : GatherReduce(group, signature, std::move(work), deadline, data,
                   block_beside_root(data.bytes(), group.size, *signature.root, group.rank)) {}

GatherReduce::GatherReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                           Buffer data, Block own)
    : ReducingCollective(group, signature, std::move(work), deadline,
                         SliceReducer(group, data.begin() + own.begin_bytes, SliceReducer::in_staging,
                                      own.bytes() / size_bytes(data.dtype), data.dtype, *signature.reduction,
                                      signature.average_over.value_or(group.size), /*bypass_cache=*/false,
                                      std::min(group.slice_bytes, most_slice_bytes))),
      data_(std::move(data)),
      root_(*signature.root) {}

void GatherReduce::start() {
  if (!is_root()) reducer_.start();
}

std::size_t GatherReduce::send_total_bytes(int peer) const { return block(peer == root_ ? group_.rank : peer).bytes(); }

std::size_t GatherReduce::recv_total_bytes(int peer) const { return block(is_root() ? peer : group_.rank).bytes(); }

iovec GatherReduce::next_send(int peer, std::size_t done_bytes) {
  if (peer == root_) return reducer_.next_result(done_bytes);
  const Block theirs = block(peer);
  return {data_.begin() + theirs.begin_bytes + done_bytes, theirs.bytes() - done_bytes};
}

// A result overwrites the root's contribution to it, which must have come to whom reduced it.
iovec GatherReduce::next_recv(int peer, std::size_t done_bytes) {
  if (!is_root()) return reducer_.next_recv(peer, done_bytes);
  const Block theirs = block(peer);
  return {data_.begin() + theirs.begin_bytes + done_bytes, theirs.bytes() - done_bytes};
}

}  // namespace holmes
