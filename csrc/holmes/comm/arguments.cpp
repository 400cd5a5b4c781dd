#include "holmes/comm/arguments.hpp"

#include "holmes/core/error.hpp"

namespace holmes {

void Arguments::check_rank(const char* what, int value) const {
  if (value >= 0 && value < options_.size) return;
  throw UsageError(std::string(what) + " " + std::to_string(value) + " is not a rank of communicator '" +
                   options_.name + "'; it has ranks 0 to " + std::to_string(options_.size - 1));
}

void Arguments::check_peer(bool is_send, int peer) const {
  check_rank(is_send ? "send: destination" : "recv: source", peer);
  if (peer == options_.rank)
    throw UsageError("rank " + std::to_string(peer) + " of communicator '" + options_.name +
                     "' cannot send to or receive from itself; copy the buffer instead");
}

void Arguments::check_one_per_rank(const char* what, const std::vector<Buffer>& buffers, DType dtype) const {
  if (static_cast<int>(buffers.size()) != options_.size)
    throw UsageError(std::string(what) + " holds " + std::to_string(buffers.size()) + " buffers; communicator '" +
                     options_.name + "' needs one for each of its " + std::to_string(options_.size) + " ranks");
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (buffers[i].dtype != dtype)
      throw UsageError(std::string(what) + "[" + std::to_string(i) + "] is " +
                       std::string(holmes::name(buffers[i].dtype)) + ", the other side of the call is " +
                       std::string(holmes::name(dtype)) + "; use one dtype");
}

void Arguments::check_equal_count(const char* operation, const Buffer& output, const Buffer& input) {
  if (output.count == input.count && output.dtype == input.dtype) return;
  throw UsageError(std::string(operation) + ": the output holds " + std::to_string(output.count) + " " +
                   std::string(holmes::name(output.dtype)) + ", this rank's part of the input " +
                   std::to_string(input.count) + " " + std::string(holmes::name(input.dtype)) + "; they must be equal");
}

void Arguments::check_not_compressed(const CallOptions& call) const {
  if (call.compression)
    throw UsageError("communicator '" + options_.name +
                     "': compression is for all_reduce, reduce_scatter and all_gather over a group that spans "
                     "clusters; leave it out here, or give each "
                     "rank its cluster's name when the communicator is made");
}

}  // namespace holmes
