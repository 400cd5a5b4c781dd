#include "holmes/collectives/short_tree.hpp"

#include <cstring>

#include "holmes/collectives/chain_broadcast.hpp"

namespace holmes {

TreePlace ShortTree::place_in(const Group& group, int root) {
  std::array<int, most_ranks> ranks;
  const std::span order = std::span(ranks).first(static_cast<std::size_t>(group.size));
  chain_order(group, root, order);
  return {group, order, group.rank};
}

std::size_t ShortTree::data_bytes() const {
  const Flow& root = flows_[*signature_.root];
  return place_.parent() < 0 ? root.sent_bytes : root.received_bytes;
}

bool ShortTree::has_room() const {
  for (const int child : place_.children())
    if (!has_room_for(child, data_bytes())) return false;
  return place_.parent() < 0 || has_room_for(place_.parent(), 0);
}

bool ShortTree::send() {
  const CollectiveHeader common = make_header(signature_, group_.slice_bytes, 0, 0, {});
  for (const int child : place_.children()) {
    flows_[child].out = common;
    flows_[child].out.payload_bytes = data_bytes();
  }
  if (place_.parent() < 0) return send_to_children(flows_[group_.rank].sent);
  flows_[place_.parent()].out = common;
  flows_[place_.parent()].out.expected_bytes = data_bytes();
  return post(place_.parent(), nullptr, 0, /*later=*/true);  // its part ends without it
}

bool ShortTree::send_to_children(const void* data) {
  is_sent_ = true;
  bool all_gone = true;
  for (const int child : place_.children()) all_gone &= post(child, data, data_bytes(), is_behind(child));
  return all_gone;
}

ShortState ShortTree::take() {
  const int parent = place_.parent();
  if (parent >= 0) {
    const ShortState state = look_at(parent, data_bytes(), /*asks=*/true);
    if (state != ShortState::ready) return state;
    if (!is_sent_ && !send_to_children(flows_[parent].payload)) return ShortState::barred;
  }
  for (const int child : place_.children()) {
    const ShortState state = look_at(child, 0, /*asks=*/false);
    flows_[child].is_owed = state == ShortState::awaited;
    if (state == ShortState::barred) return state;
  }
  finish();
  return ShortState::ready;
}

void ShortTree::finish() {
  if (place_.parent() >= 0) {
    if (data_bytes() > 0) std::memcpy(flows_[*signature_.root].received, flows_[place_.parent()].payload, data_bytes());
    group_.channels[place_.parent()]->consume(collective_header_bytes + data_bytes());
  }
  for (const int child : place_.children())
    if (!flows_[child].is_owed) group_.channels[child]->consume(collective_header_bytes);
}

bool ShortTree::append_owed(OwedHeaders& owed, Clock::time_point deadline) const {
  bool any = false;
  for (const int child : place_.children()) {
    if (!flows_[child].is_owed) continue;
    owed.add(child, flows_[child].out, {}, 0, deadline);
    any = true;
  }
  return any;
}

}  // namespace holmes
