#include "holmes/collectives/short_exchange.hpp"

#include <cstring>

namespace holmes {

bool ShortExchange::has_room() const {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && talks_to(peer) && !has_room_for(peer, flows_[peer].sent_bytes)) return false;
  return true;
}

// Each rank starts with another peer, as in Collective.
bool ShortExchange::send() {
  const CollectiveHeader common = make_header(signature_, group_.slice_bytes, 0, 0, {});
  bool all_gone = true;
  for (int step = 1; step < group_.size; ++step) {
    const int peer = (group_.rank + step) % group_.size;
    if (!talks_to(peer)) continue;
    Flow& flow = flows_[peer];
    flow.out = common;
    flow.out.payload_bytes = flow.sent_bytes;
    flow.out.expected_bytes = flow.received_bytes;
    // The peer's part ends without a header alone.
    const bool later = ends_early_ && (flow.sent_bytes == 0 || is_behind(peer));
    all_gone &= post(peer, flow.sent, flow.sent_bytes, later);
  }
  return all_gone;
}

ShortState ShortExchange::take() {
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || !talks_to(peer)) continue;
    Flow& flow = flows_[peer];
    const bool may_be_owed = ends_early_ && flow.received_bytes == 0;
    const ShortState state = look_at(peer, flow.received_bytes, /*asks=*/!may_be_owed);
    flow.is_owed = may_be_owed && state == ShortState::awaited;
    if (state != ShortState::ready && !flow.is_owed) return state;
  }
  finish();
  return ShortState::ready;
}

void ShortExchange::finish() {
  if (reduced_count_ > 0) {
    std::array<const void*, most_ranks> sources;
    for (int peer = 0; peer < group_.size; ++peer)
      sources[peer] = peer == group_.rank ? flows_[peer].sent : flows_[peer].payload;
    reduce_all(sources.data());
  } else {
    copy_own();
  }
  for (int peer = 0; peer < group_.size; ++peer) {
    const Flow& flow = flows_[peer];
    if (peer == group_.rank || !talks_to(peer) || flow.is_owed) continue;
    if (reduced_count_ == 0 && flow.received_bytes > 0) std::memcpy(flow.received, flow.payload, flow.received_bytes);
    group_.channels[peer]->consume(collective_header_bytes + flow.received_bytes);
  }
}

bool ShortExchange::append_owed(OwedHeaders& owed, Clock::time_point deadline) const {
  bool any = false;
  for (int peer = 0; ends_early_ && peer < group_.size; ++peer) {
    if (peer == group_.rank || !talks_to(peer) || !flows_[peer].is_owed) continue;
    owed.add(peer, flows_[peer].out, {}, 0, deadline);
    any = true;
  }
  return any;
}

}  // namespace holmes
