#include "holmes/collectives/reduce_scatter.hpp"

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

}  // namespace holmes
