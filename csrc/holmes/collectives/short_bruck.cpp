#include "holmes/collectives/short_bruck.hpp"

#include <cstring>

namespace holmes {

bool ShortBruck::has_room() const {
  constexpr std::size_t most_bytes = most_ranks / 2 * most_short_bytes;
  for (int step = 0; step < steps_.count(); ++step)
    if (!has_room_for(steps_.to(step), most_bytes)) return false;
  return true;
}

std::size_t ShortBruck::block_bytes(int rank) const {
  if (signature_.op == OpCode::reduce_scatter) {
    std::size_t all = 0;
    for (int peer = 0; peer < group_.size; ++peer) all += flows_[peer].sent_bytes;
    return all;
  }
  return rank == group_.rank || signature_.reduction ? flows_[group_.rank].sent_bytes : flows_[rank].received_bytes;
}

void ShortBruck::prepare() {
  begin_[0] = 0;
  for (int number = 0; number < group_.size; ++number)
    begin_[number + 1] = begin_[number] + block_bytes((group_.rank + number) % group_.size);
  std::byte* to = slot(0);
  const bool has_all = signature_.op == OpCode::reduce_scatter;
  for (int peer = 0; peer < group_.size; ++peer) {
    const Flow& flow = flows_[peer];
    if ((peer != group_.rank && !has_all) || flow.sent_bytes == 0) continue;
    std::memcpy(to, flow.sent, flow.sent_bytes);
    to += flow.sent_bytes;
  }
  const CollectiveHeader common = make_header(signature_, group_.slice_bytes, 0, 0, {});
  for (int step = 0; step < steps_.count(); ++step) {
    flows_[steps_.to(step)].out = common;
    flows_[steps_.from(step)].out = common;
  }
  for (int step = 0; step < steps_.count(); ++step) {
    flows_[steps_.to(step)].out.payload_bytes = steps_.sent_bytes(begin_, step);
    flows_[steps_.from(step)].out.expected_bytes = steps_.received_bytes(begin_, step);
  }
}

bool ShortBruck::send_step(int step) {
  const int peer = steps_.to(step);
  return post(peer, slot(0), flows_[peer].out.payload_bytes, /*later=*/false);
}

bool ShortBruck::send() {
  prepare();
  return send_step(0);
}

ShortState ShortBruck::take() {
  for (; step_ < steps_.count(); ++step_) {
    const int peer = steps_.from(step_);
    const std::size_t bytes = flows_[peer].out.expected_bytes;
    if (const ShortState state = look_at(peer, bytes, /*asks=*/true); state != ShortState::ready) return state;
    if (bytes > 0) std::memcpy(slot(BruckSteps::first_slot(step_)), flows_[peer].payload, bytes);
    if (step_ + 1 < steps_.count() && !send_step(step_ + 1)) return ShortState::barred;
  }
  finish();
  return ShortState::ready;
}

void ShortBruck::finish() {
  if (signature_.reduction) {
    std::size_t begin_bytes = 0;
    for (int peer = 0; signature_.op == OpCode::reduce_scatter && peer < group_.rank; ++peer)
      begin_bytes += flows_[peer].sent_bytes;
    std::array<const void*, most_ranks> sources;
    for (int rank = 0; rank < group_.size; ++rank) sources[rank] = slot(steps_.slot_of(rank)) + begin_bytes;
    if (reduced_count_ > 0) reduce_all(sources.data());
  } else {
    copy_own();
    for (int rank = 0; rank < group_.size; ++rank) {
      const Flow& flow = flows_[rank];
      if (rank != group_.rank && flow.received_bytes > 0)
        std::memcpy(flow.received, slot(steps_.slot_of(rank)), flow.received_bytes);
    }
  }
  for (int step = 0; step < steps_.count(); ++step) {
    const int peer = steps_.from(step);
    group_.channels[peer]->consume(collective_header_bytes + flows_[peer].out.expected_bytes);
  }
}

}  // namespace holmes
