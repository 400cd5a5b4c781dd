#include "holmes/collectives/collective.hpp"

#include <algorithm>

#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

// From so many on a channel is told that what is sent stays as it is, so that it may send it from there.
constexpr std::size_t least_kept_bytes = 64 * 1024;

}  // namespace

Collective::Collective(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline)
    : group_(group), signature_(std::move(signature)), work_(std::move(work)), deadline_(deadline) {
  if (whole_number()) group_.whole->begin_step();
}

Collective::~Collective() {
  if (whole_number()) group_.whole->end_step();
}

void Collective::prepare() {
  prepared_ = true;
  copies_.begin(group_, signature_.op, agreed_bytes(), [this] { return sends_shared(); });
  ends_early_ = ends_locally(group_, signature_) && !copies_.votes() && may_end_early();
  flows_.resize(static_cast<std::size_t>(group_.size));
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    Flow& flow = flows_[peer];
    flow.out =
        make_header(signature_, group_.slice_bytes, send_total_bytes(peer), recv_total_bytes(peer), copies_.ballot());
    if (sends_to(peer)) flow.out_total = collective_header_bytes + send_total_bytes(peer);
    if (receives_from(peer)) flow.in_total = collective_header_bytes + recv_total_bytes(peer);
    if (!gone_bytes_.empty()) flow.out_bytes = gone_bytes_[static_cast<std::size_t>(peer)];
    open_sends_ += flow.out_bytes < flow.out_total;
    open_flows_ += (flow.out_bytes < flow.out_total) + (flow.in_total > 0);
  }
  // On a far path what has come tells late.
  if (pacing() != Pacing::none && !group_.is_far && is_worth(pacing())) update_pace();
}

// Whether flows are long enough to drift apart, and about as long where bytes count. By what is sent, only those that
// carry something count.
bool Collective::is_worth(Pacing pacing) const {
  std::size_t least = SIZE_MAX;
  std::size_t most = 0;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const Flow& flow = flows_[peer];
    if (pacing == Pacing::by_sent && flow.out_total <= collective_header_bytes) continue;
    least = std::min(least, flow.out_total);
    most = std::max(most, flow.out_total);
    if (pacing == Pacing::by_sent) continue;
    least = std::min(least, flow.in_total);
    most = std::max(most, flow.in_total);
  }
  return most > min_lead_bytes && (pacing == Pacing::by_share || most / 2 <= least);
}

// By the slowest peer, of those with which something moves.
void Collective::update_pace() {
  const bool by_sent = pacing() == Pacing::by_sent;
  const bool by_share = pacing() == Pacing::by_share;
  Pace::Least least;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const Flow& flow = flows_[peer];
    const std::size_t done = by_sent ? flow.out_bytes : flow.in_bytes;
    const std::size_t total = by_sent ? flow.out_total : flow.in_total;
    if (total <= collective_header_bytes || done >= total) continue;
    if (!by_share && done < least.bytes) least = {done, std::nullopt};
    const double share = static_cast<double>(done) / static_cast<double>(total);
    if (by_share && share < least.share.value_or(1)) least = {done, share};
  }
  pace_.update(least, group_);
}

bool Collective::all_headers_received() const {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && !header_received(peer)) return false;
  return true;
}

void Collective::end() {
  copies_.end(group_, [this](int peer) -> const CopyVote::Ballot& { return flows_[peer].in.ballot; });
}

bool Collective::advance() {
  if (!prepared_) prepare();
  bool moved = false;
  // Each rank starts with another peer, so that not all send to the same one.
  for (int step = 1; step < group_.size; ++step) moved |= send_to((group_.rank + step) % group_.size);
  const ComputeTurn turn = compute_turn();
  if (turn == ComputeTurn::first) moved |= compute();
  for (int step = 1; step < group_.size; ++step) {
    const int peer = (group_.rank + group_.size - step) % group_.size;
    if (!recv_from(peer)) continue;
    moved = true;
    if (group_.is_direct) recv_from(peer);  // so that the HCA reads the next piece while this one is reduced
  }
  if (copies_.awaits_arrivals() && all_headers_received())
    copies_.all_arrived(group_, [this](int peer) -> const CopyVote::Ballot& { return flows_[peer].in.ballot; });
  if (turn == ComputeTurn::after_receiving || !moved) moved |= compute();
  if (pace_.is_kept() && moved) update_pace();
  return moved;
}

bool Touched::overlaps_from(std::size_t size) const {
  const std::span all(pieces_);
  return std::ranges::any_of(all.subspan(size), [&](const auto& later) {
    return std::ranges::any_of(all.first(size), [&](const auto& earlier) {
      return later.data() < earlier.data() + earlier.size() && earlier.data() < later.data() + later.size();
    });
  });
}

bool Collective::send_ahead() {
  if (!prepared_) prepare();
  bool moved = false;
  for (int step = 1; step < group_.size; ++step) moved |= send_to((group_.rank + step) % group_.size);
  return moved;
}

std::size_t Collective::send_bytes() const {
  std::size_t bytes = 0;
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank) bytes += send_total_bytes(peer);
  return bytes;
}

bool Collective::is_done() const { return prepared_ && open_flows_ == 0 && is_computed(); }

bool Collective::is_done_here() const {
  if (!ends_early_ || !prepared_ || open_sends_ > 0 || !is_computed()) return false;
  return std::ranges::all_of(flows_, [](const Flow& flow) {
    return flow.in_bytes == flow.in_total ||
           (flow.in_total == collective_header_bytes && flow.in_bytes < collective_header_bytes);
  });
}

void Collective::append_owed(OwedHeaders& owed) const {
  for (int peer = 0; peer < group_.size; ++peer) {
    const Flow& flow = flows_[peer];
    if (flow.in_bytes < flow.in_total) owed.add(peer, flow.out, flow.in, flow.in_bytes, deadline_);
  }
}

bool Collective::is_lasting(int peer, const iovec& piece) const {
  return piece.iov_len >= group_.channels[peer]->lasting_bytes();
}

// The payload that may be sent now. What lasts keeps no pace: the peer reads it when it comes to it. (And while it does
// so, the same or more of it is asked for: what is next grows only, where a pace would cut it off.)
iovec Collective::next_paced_send(int peer) {
  const std::size_t sent = flows_[peer].out_bytes;
  iovec piece = next_send(peer, sent - std::min(sent, collective_header_bytes));
  if (!is_lasting(peer, piece) && group_.channels[peer]->keeps_pace())
    piece.iov_len = std::min(piece.iov_len, pace_.sendable_bytes(sent, flows_[peer].out_total));
  return piece;
}

bool Collective::send_to(int peer) {
  Flow& flow = flows_[peer];
  if (flow.out_bytes == flow.out_total || !may_send(peer)) return false;
  iovec pieces[2];
  std::size_t count = 0;
  if (flow.out_bytes < collective_header_bytes)
    pieces[count++] = {reinterpret_cast<std::byte*>(&flow.out) + flow.out_bytes,
                       collective_header_bytes - flow.out_bytes};
  bool lasts = false;
  if (flow.out_total > collective_header_bytes && copies_.is_decided()) {
    pieces[count] = next_paced_send(peer);
    lasts = is_lasting(peer, pieces[count]) ||
            (pieces[count].iov_len >= least_kept_bytes && group_.channels[peer]->lasting_bytes() < SIZE_MAX);
    if (pieces[count].iov_len) ++count;
  }
  if (count == 0) return false;
  const std::size_t bytes = send(peer, {pieces, count}, lasts);
  flow.out_bytes += bytes;
  if (flow.out_bytes == flow.out_total) --open_flows_, --open_sends_;
  return bytes > 0;
}

bool Collective::recv_from(int peer) {
  Flow& flow = flows_[peer];
  if (flow.in_bytes == flow.in_total || (!group_.owed.empty() && group_.owed[static_cast<std::size_t>(peer)]))
    return false;
  iovec pieces[2];
  std::size_t count = 0;
  const std::size_t before = flow.in_bytes;
  if (before < collective_header_bytes)
    pieces[count++] = {reinterpret_cast<std::byte*>(&flow.in) + before, collective_header_bytes - before};
  if (flow.in_total > collective_header_bytes && copies_.is_decided()) {
    pieces[count] = next_recv(peer, before < collective_header_bytes ? 0 : before - collective_header_bytes);
    if (pieces[count].iov_len) ++count;
  }
  if (count == 0) return false;
  Channel& channel = *group_.channels[peer];
  const bool is_payload = before >= collective_header_bytes;
  const std::size_t bytes = is_payload ? channel.try_recv_lasting(pieces[0]) : channel.try_recv({pieces, count});
  if (bytes == 0) return false;
  flow.in_bytes += bytes;
  if (before < collective_header_bytes && flow.in_bytes >= collective_header_bytes)
    check_header(flow.out, flow.in, group_, peer);
  if (flow.in_bytes == flow.in_total) --open_flows_;
  return true;
}

std::size_t Collective::send(int peer, std::span<const iovec> pieces, bool lasts) {
  Channel& channel = *group_.channels[peer];
  if (lasts) return channel.try_send_lasting(pieces);
  if (!ends_early_ || flows_[peer].out_total > collective_header_bytes) return channel.try_send(pieces);
  const std::size_t bytes = channel.try_send_later(pieces);  // the peer's part ends without it
  if (channel.keeps_any()) group_.keep_until(deadline_);
  return bytes;
}

std::size_t Collective::received_bytes(int peer) const {
  const Flow& flow = flows_[peer];
  return flow.in_bytes > collective_header_bytes ? flow.in_bytes - collective_header_bytes : 0;
}

std::size_t Collective::sent_bytes(int peer) const {
  const Flow& flow = flows_[peer];
  return flow.out_bytes > collective_header_bytes ? flow.out_bytes - collective_header_bytes : 0;
}

bool Collective::header_received(int peer) const { return flows_[peer].in_bytes >= collective_header_bytes; }

void Collective::count_received(int peer, std::size_t bytes) {
  Flow& flow = flows_[peer];
  flow.in_bytes += bytes;
  if (flow.in_bytes == flow.in_total) --open_flows_;
}

std::size_t Collective::awaited_recv_bytes(int peer) {
  const Flow& flow = flows_[peer];
  if (flow.in_bytes == flow.in_total) return 0;
  if (flow.in_bytes < collective_header_bytes) return 1;  // its own, or one before it
  if (!copies_.is_decided()) return 0;
  if (awaits_peek(peer)) return 1;
  return next_recv(peer, flow.in_bytes - collective_header_bytes).iov_len;
}

std::size_t Collective::awaited_send_bytes(int peer) {
  const Flow& flow = flows_[peer];
  if (flow.out_bytes == flow.out_total || !may_send(peer)) return 0;
  if (flow.out_bytes < collective_header_bytes) return 1;
  if (!copies_.is_decided()) return 0;
  return next_paced_send(peer).iov_len;
}

bool Collective::involves(int peer) const {
  if (flows_.empty()) return true;
  return flows_[peer].in_bytes < flows_[peer].in_total || flows_[peer].out_bytes < flows_[peer].out_total;
}

std::string Collective::describe() const { return holmes::describe(signature_, group_.name); }

std::vector<PeerProgress> Collective::progress() const {
  const auto payload = [](std::size_t bytes) {
    return bytes > collective_header_bytes ? bytes - collective_header_bytes : 0;
  };
  std::vector<PeerProgress> missing;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || flows_.empty() || !involves(peer)) continue;
    const Flow& flow = flows_[peer];
    missing.push_back({peer, flow.in_bytes >= collective_header_bytes || flow.in_total == 0, payload(flow.in_bytes),
                       payload(flow.in_total), payload(flow.out_bytes), payload(flow.out_total)});
  }
  return missing;
}

RecordedCall Collective::recorded_call() const { return holmes::recorded_call(signature_); }

std::string Collective::describe_wait(const std::vector<char>& entered) const {
  std::string text;
  std::string waiting;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || flows_.empty()) continue;
    const Flow& flow = flows_[peer];
    const bool is_heard = flow.in_bytes >= collective_header_bytes;
    std::string what;
    if (!is_heard && !entered[static_cast<std::size_t>(peer)]) {
      what = "has not entered it";
    } else if (!is_heard && flow.in_total > 0) {
      add_word(waiting, group_.controls[peer]->describe() + ": in it, nothing received yet", "; ");
    } else if (flow.in_bytes < flow.in_total) {
      what = std::to_string(received_bytes(peer)) + " of " + std::to_string(flow.in_total - collective_header_bytes) +
             " bytes received";
    } else if (flow.out_bytes < flow.out_total && may_send(peer)) {
      what = "takes no more data (" + std::to_string(flow.out_bytes) + " of " + std::to_string(flow.out_total) +
             " bytes sent)";
    }
    if (!what.empty()) add_word(text, group_.controls[peer]->describe() + ": " + what, "; ");
  }
  if (text.empty()) text = waiting;
  return text.empty() ? "nobody" : text;
}

}  // namespace holmes
