#include "holmes/collectives/bruck.hpp"

#include <algorithm>
#include <cstring>

#include "holmes/reduce/reduce.hpp"

namespace holmes {
namespace {

std::vector<std::size_t> bytes_of(const std::vector<Buffer>& buffers) {
  std::vector<std::size_t> bytes;
  for (const Buffer& buffer : buffers) bytes.push_back(buffer.bytes());
  return bytes;
}

}  // namespace

Bruck::Bruck(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
             std::vector<std::size_t> block_bytes)
    : Collective(group, signature, std::move(work), deadline) {
  // Not padded: lengths on the wire differ wherever counts do. Blocks are of one dtype, so elements stay aligned.
  begin_.push_back(0);
  for (int slot = 0; slot < group.size; ++slot)
    begin_.push_back(begin_.back() + block_bytes[static_cast<std::size_t>((group.rank + slot) % group.size)]);
}

void Bruck::start() {
  staging_ = group_.staging_bytes(begin_.back());
  fill_own(staging_);
}

int Bruck::steps_received() const {
  int step = 0;
  while (step < steps_.count()) {
    const int peer = steps_.from(step);
    if (!header_received(peer) || received_bytes(peer) < recv_total_bytes(peer)) break;
    ++step;
  }
  return step;
}

std::size_t Bruck::recv_total_bytes(int peer) const {
  const int step = steps_.step_from(peer);
  return step < 0 ? 0 : steps_.received_bytes(begin_, step);
}

iovec Bruck::next_send(int peer, std::size_t done_bytes) {
  return {staging_ + done_bytes, send_total_bytes(peer) - done_bytes};
}

iovec Bruck::next_recv(int peer, std::size_t done_bytes) {
  const std::size_t first = BruckSteps::first_slot(steps_.step_from(peer));
  return {staging_ + begin_[first] + done_bytes, recv_total_bytes(peer) - done_bytes};
}

bool Bruck::compute() {
  if (finished_ || steps_received() < steps_.count()) return false;
  finished_ = true;
  finish();
  return true;
}

BruckAllGather::BruckAllGather(Group& group, Signature signature, std::shared_ptr<Work> work,
                               Clock::time_point deadline, std::vector<Buffer> outputs, Buffer input)
    : Bruck(group, signature, std::move(work), deadline, bytes_of(outputs)),
      outputs_(std::move(outputs)),
      input_(std::move(input)) {}

void BruckAllGather::fill_own(std::byte* block) {
  if (input_.count) std::memcpy(block, input_.data, input_.bytes());
}

void BruckAllGather::finish() {
  for (int rank = 0; rank < group_.size; ++rank) {
    const Buffer& output = outputs_[static_cast<std::size_t>(rank)];
    const bool is_there = rank == group_.rank && output.data == input_.data;
    if (output.count && !is_there) std::memcpy(output.data, block(rank), output.bytes());
  }
}

BruckReduce::BruckReduce(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline,
                         Buffer output, std::vector<Buffer> inputs, std::size_t begin)
    : Bruck(group, signature, std::move(work), deadline,
            std::vector<std::size_t>(static_cast<std::size_t>(group.size), total_bytes(inputs))),
      output_(std::move(output)),
      inputs_(std::move(inputs)),
      begin_bytes_(begin * size_bytes(output_.dtype)) {}

void BruckReduce::fill_own(std::byte* block) {
  for (const Buffer& input : inputs_) {
    if (input.count) std::memcpy(block, input.data, input.bytes());
    block += input.bytes();
  }
}

void BruckReduce::finish() {
  if (output_.count == 0) return;
  std::vector<const void*> sources(static_cast<std::size_t>(group_.size));
  for (int rank = 0; rank < group_.size; ++rank) sources[static_cast<std::size_t>(rank)] = block(rank) + begin_bytes_;
  reduce(output_.data, sources.data(), group_.size, output_.count, output_.dtype, *signature_.reduction,
         signature_.average_over.value_or(group_.size));
}

}  // namespace holmes
