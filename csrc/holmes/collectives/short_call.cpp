#include "holmes/collectives/short_call.hpp"

#include <cstring>

#include "holmes/reduce/reduce.hpp"

namespace holmes {

void ShortCall::set(int peer, const void* sent, std::size_t sent_bytes, void* received, std::size_t received_bytes) {
  Flow& flow = flows_[static_cast<std::size_t>(peer)];
  flow.sent = sent;
  flow.sent_bytes = sent_bytes;
  flow.received = received;
  flow.received_bytes = received_bytes;
  flow.gone_bytes = 0;
  flow.payload = nullptr;
  flow.is_owed = false;
}

// The peer has more of this rank's operations to go through than headers are kept (Channel::try_send_later) or wait to
// be read.
bool ShortCall::is_behind(int peer) const {
  constexpr std::uint32_t far_ahead = 32;
  return !group_.owed.empty() && group_.owed[static_cast<std::size_t>(peer)] >= far_ahead;
}

bool ShortCall::post(int peer, const void* sent, std::size_t bytes, bool later) {
  Flow& flow = flows_[peer];
  Channel& channel = *group_.channels[peer];
  const std::array pieces{iovec{&flow.out, collective_header_bytes}, iovec{const_cast<void*>(sent), bytes}};
  flow.gone_bytes = channel.send_short({pieces.data(), bytes > 0 ? pieces.size() : 1}, later);
  if (later && channel.keeps_any()) {
    keeps_any_ = true;
    keeps_payload_ |= bytes > 0;
  }
  return flow.gone_bytes == collective_header_bytes + bytes;
}

ShortState ShortCall::look_at(int peer, std::size_t bytes, bool asks) {
  Flow& flow = flows_[peer];
  if (flow.payload) return ShortState::ready;
  const bool is_behind_others = !group_.owed.empty() && group_.owed[static_cast<std::size_t>(peer)];
  const std::byte* const came =
      is_behind_others ? nullptr : group_.channels[peer]->peek_short(collective_header_bytes + bytes, asks);
  if (!came) return ShortState::awaited;
  CollectiveHeader theirs;
  std::memcpy(&theirs, came, collective_header_bytes);
  if (!is_same_call(flow.out, theirs)) return ShortState::barred;
  flow.payload = came + collective_header_bytes;
  return ShortState::ready;
}

void ShortCall::copy_own() const {
  const Flow& own = flows_[group_.rank];
  if (own.received_bytes > 0 && own.received != own.sent) std::memmove(own.received, own.sent, own.received_bytes);
}

void ShortCall::reduce_all(const void* const* sources) const {
  reduce(flows_[group_.rank].received, sources, group_.size, reduced_count_, signature_.dtype, *signature_.reduction,
         signature_.average_over.value_or(group_.size));
}

std::vector<std::size_t> ShortCall::gone_bytes() const {
  std::vector<std::size_t> gone;
  for (int peer = 0; peer < group_.size; ++peer) gone.push_back(flows_[peer].gone_bytes);
  return gone;
}

}  // namespace holmes
