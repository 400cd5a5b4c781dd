#include "holmes/collectives/short_exchange.hpp"

#include <cstring>

#include "holmes/reduce/reduce.hpp"

namespace holmes {
ShortExchange::ShortExchange(Group& group, const Signature& signature)
    : group_(group), signature_(signature), ends_early_(group.local_completion && signature.root.has_value()) {}

void ShortExchange::set(int peer, const void* sent, std::size_t sent_bytes, void* received,
                        std::size_t received_bytes) {
  Flow& flow = flows_[static_cast<std::size_t>(peer)];
  flow.sent = sent;
  flow.sent_bytes = sent_bytes;
  flow.received = received;
  flow.received_bytes = received_bytes;
  flow.payload = nullptr;
  flow.is_owed = false;
}

bool ShortExchange::has_room() const {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && talks_to(peer) &&
        group_.channels[peer]->short_room_bytes() < collective_header_bytes + flows_[peer].sent_bytes)
      return false;
  return true;
}

// Each rank starts with another peer, as in Collective.
void ShortExchange::send() {
  const CollectiveHeader common = make_header(signature_, group_.slice_bytes, 0, 0, {});
  for (int step = 1; step < group_.size; ++step) {
    const int peer = (group_.rank + step) % group_.size;
    if (!talks_to(peer)) continue;
    Flow& flow = flows_[peer];
    flow.out = common;
    flow.out.payload_bytes = flow.sent_bytes;
    flow.out.expected_bytes = flow.received_bytes;
    const std::array pieces{iovec{&flow.out, collective_header_bytes},
                            iovec{const_cast<void*>(flow.sent), flow.sent_bytes}};
    group_.channels[peer]->send_short({pieces.data(), flow.sent_bytes > 0 ? pieces.size() : 1});
  }
}

// Whether all is there that `peer` sends, or is not waited for.
bool ShortExchange::look_at(int peer) {
  Flow& flow = flows_[peer];
  if (flow.payload) return true;
  const std::byte* const came = !group_.owed.empty() && group_.owed[static_cast<std::size_t>(peer)]
                                    ? nullptr
                                    : group_.channels[peer]->peek_short(collective_header_bytes + flow.received_bytes);
  flow.is_owed = !came && ends_early_ && flow.received_bytes == 0;
  if (!came) return flow.is_owed;
  CollectiveHeader theirs;
  std::memcpy(&theirs, came, collective_header_bytes);
  if (!is_same_call(flow.out, theirs)) return false;
  flow.payload = came + collective_header_bytes;
  return true;
}

bool ShortExchange::take() {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && talks_to(peer) && !look_at(peer)) return false;
  finish();
  return true;
}

void ShortExchange::finish() {
  Flow& own = flows_[group_.rank];
  if (reduced_count_ > 0) {
    std::array<const void*, most_ranks> sources;
    for (int peer = 0; peer < group_.size; ++peer)
      sources[peer] = peer == group_.rank ? own.sent : flows_[peer].payload;
    reduce(own.received, sources.data(), group_.size, reduced_count_, signature_.dtype, *signature_.reduction,
           signature_.average_over.value_or(group_.size));
  } else if (own.received_bytes > 0 && own.received != own.sent) {
    std::memmove(own.received, own.sent, own.received_bytes);
  }
  for (int peer = 0; peer < group_.size; ++peer) {
    Flow& flow = flows_[peer];
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
