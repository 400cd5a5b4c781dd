#include "holmes/collectives/collective.hpp"

#include <algorithm>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::uint32_t header_magic = 0x484c4d31;  // "HLM1"
constexpr std::uint8_t no_reduction = 255;

std::string_view compression_suffix(Form form) {
  if (form == Form::hierarchical_bf16) return " with bf16 compression";
  return form == Form::hierarchical_int8 ? " with int8 compression" : "";
}

}  // namespace

Collective::Collective(Group& group, Signature signature, std::shared_ptr<Work> work, Clock::time_point deadline)
    : group_(group), signature_(signature), work_(std::move(work)), deadline_(deadline) {}

Collective::Header Collective::make_header(int peer) const {
  return {header_magic,
          signature_.op,
          signature_.dtype,
          signature_.reduction ? static_cast<std::uint8_t>(*signature_.reduction) : no_reduction,
          signature_.form,
          signature_.root.value_or(-1),
          static_cast<std::uint32_t>(group_.slice_bytes),
          signature_.sequence,
          send_total_bytes(peer),
          recv_total_bytes(peer),
          signature_.announced_bytes,
          costs_.word(),
          {}};
}

void Collective::prepare() {
  prepared_ = true;
  prepare_windows();
  flows_.resize(static_cast<std::size_t>(group_.size));
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    Flow& flow = flows_[peer];
    flow.out = make_header(peer);
    if (sends_to(peer)) flow.out_total = sizeof(Header) + send_total_bytes(peer);
    if (receives_from(peer)) flow.in_total = sizeof(Header) + recv_total_bytes(peer);
    open_flows_ += (flow.out_total > 0) + (flow.in_total > 0);
  }
  if (keeps_pace() && is_even()) update_pace();
}

void Collective::prepare_windows() {
  votes_ = group_.all_shared_memory && WindowVote::concerns(agreed_bytes(), group_.size);
  if (!votes_) return;
  const int operation = static_cast<int>(signature_.op);
  shows_ = group_.window_vote.shows(operation, agreed_bytes());
  CmaUse use = CmaUse::always;
  for (const auto& channel : group_.channels) {
    if (!channel) continue;
    use = std::min(use, channel->window_use());
    channel->set_windows(shows_);
  }
  costs_ = group_.window_vote.costs(operation, agreed_bytes(), use);
}

void Collective::notice_arrivals() {
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && !header_received(peer)) return;
  all_here_at_ = Clock::now();
}

void Collective::end() {
  if (!votes_) return;
  std::optional<WindowVote::Costs> total;
  for (int rank = 0; rank < group_.size; ++rank) {
    const auto costs = rank == group_.rank ? costs_ : WindowVote::Costs::from(flows_[rank].in.window_costs);
    total = total ? *total + costs : costs;
    if (rank != group_.rank) group_.channels[rank]->set_windows(std::nullopt);
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - all_here_at_.value_or(Clock::now())).count();
  group_.window_vote.ended(static_cast<int>(signature_.op), agreed_bytes(), seconds, *total);
}

// Whether all flows are about as long, and long enough to drift apart.
bool Collective::is_even() const {
  std::size_t least = SIZE_MAX;
  std::size_t most = 0;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const Flow& flow = flows_[peer];
    least = std::min({least, flow.in_total, flow.out_total});
    most = std::max({most, flow.in_total, flow.out_total});
  }
  return most > min_lead_bytes && most / 2 <= least;
}

void Collective::update_pace() {
  // Paths get known while they are used.
  constexpr std::size_t known_bytes = 4 * 1024 * 1024;
  std::size_t least = SIZE_MAX;
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank && flows_[peer].in_bytes < flows_[peer].in_total)
      least = std::min(least, flows_[peer].in_bytes);
  if (least != SIZE_MAX && least >= lead_known_until_) {
    lead_known_until_ = least + known_bytes;
    for (int peer = 0; peer < group_.size; ++peer)
      if (peer != group_.rank) lead_bytes_ = std::max(lead_bytes_, group_.channels[peer]->lead_bytes());
  }
  send_limit_ = least == SIZE_MAX ? SIZE_MAX : least + lead_bytes_;
}

bool Collective::advance() {
  if (!prepared_) prepare();
  bool moved = false;
  // Each rank starts with another peer, so that not all send to the same one.
  for (int step = 1; step < group_.size; ++step) moved |= send_to((group_.rank + step) % group_.size);
  for (int step = 1; step < group_.size; ++step) moved |= recv_from((group_.rank + group_.size - step) % group_.size);
  moved |= compute();
  if (votes_ && !all_here_at_) notice_arrivals();
  if (lead_bytes_ && moved) update_pace();
  return moved;
}

std::size_t Collective::send_bytes() const {
  std::size_t bytes = 0;
  for (int peer = 0; peer < group_.size; ++peer)
    if (peer != group_.rank) bytes += send_total_bytes(peer);
  return bytes;
}

bool Collective::is_done() const { return prepared_ && open_flows_ == 0 && is_computed(); }

bool Collective::send_to(int peer) {
  Flow& flow = flows_[peer];
  if (flow.out_bytes == flow.out_total || !may_send(peer)) return false;
  iovec pieces[2];
  std::size_t count = 0;
  std::size_t done = 0;
  if (flow.out_bytes < sizeof(Header)) {
    pieces[count++] = {reinterpret_cast<std::byte*>(&flow.out) + flow.out_bytes, sizeof(Header) - flow.out_bytes};
  } else {
    done = flow.out_bytes - sizeof(Header);
  }
  if (flow.out_total > sizeof(Header)) {
    pieces[count] = next_send(peer, done);
    pieces[count].iov_len = std::min(pieces[count].iov_len, sendable_bytes(flow));
    if (pieces[count].iov_len) ++count;
  }
  if (count == 0) return false;
  const std::size_t bytes = group_.channels[peer]->try_send({pieces, count});
  flow.out_bytes += bytes;
  if (flow.out_bytes == flow.out_total) --open_flows_;
  return bytes > 0;
}

bool Collective::recv_from(int peer) {
  Flow& flow = flows_[peer];
  if (flow.in_bytes == flow.in_total) return false;
  iovec pieces[2];
  std::size_t count = 0;
  const std::size_t before = flow.in_bytes;
  if (before < sizeof(Header))
    pieces[count++] = {reinterpret_cast<std::byte*>(&flow.in) + before, sizeof(Header) - before};
  if (flow.in_total > sizeof(Header)) {
    pieces[count] = next_recv(peer, before < sizeof(Header) ? 0 : before - sizeof(Header));
    if (pieces[count].iov_len) ++count;
  }
  if (count == 0) return false;
  const std::size_t bytes = group_.channels[peer]->try_recv({pieces, count});
  if (bytes == 0) return false;
  flow.in_bytes += bytes;
  if (before < sizeof(Header) && flow.in_bytes >= sizeof(Header)) check_header(peer);
  if (flow.in_bytes == flow.in_total) --open_flows_;
  return true;
}

std::size_t Collective::received_bytes(int peer) const {
  const Flow& flow = flows_[peer];
  return flow.in_bytes > sizeof(Header) ? flow.in_bytes - sizeof(Header) : 0;
}

bool Collective::header_received(int peer) const { return flows_[peer].in_bytes >= sizeof(Header); }

void Collective::count_received(int peer, std::size_t bytes) {
  Flow& flow = flows_[peer];
  flow.in_bytes += bytes;
  if (flow.in_bytes == flow.in_total) --open_flows_;
}

std::size_t Collective::awaited_recv_bytes(int peer) {
  const Flow& flow = flows_[peer];
  if (flow.in_bytes == flow.in_total) return 0;
  if (flow.in_bytes < sizeof(Header) || awaits_peek(peer)) return 1;
  return next_recv(peer, flow.in_bytes - sizeof(Header)).iov_len;
}

std::size_t Collective::awaited_send_bytes(int peer) {
  const Flow& flow = flows_[peer];
  if (flow.out_bytes == flow.out_total || !may_send(peer)) return 0;
  if (flow.out_bytes < sizeof(Header)) return 1;
  return std::min(next_send(peer, flow.out_bytes - sizeof(Header)).iov_len, sendable_bytes(flow));
}

bool Collective::involves(int peer) const {
  if (flows_.empty()) return true;
  return flows_[peer].in_bytes < flows_[peer].in_total || flows_[peer].out_bytes < flows_[peer].out_total;
}

std::string Collective::describe() const {
  std::string text(name(signature_.op));
  text += " #" + std::to_string(signature_.sequence) + " (" + std::string(holmes::name(signature_.dtype));
  if (signature_.reduction) text += ", " + std::string(holmes::name(*signature_.reduction));
  if (signature_.root) text += ", root " + std::to_string(*signature_.root);
  return text + ") of communicator '" + group_.name + "'";
}

std::string Collective::describe(const Header& header) const {
  std::string text(name(header.op));
  text += " #" + std::to_string(header.sequence);
  if (static_cast<int>(header.dtype) < dtype_count) text += " " + std::string(holmes::name(header.dtype));
  if (header.reduction < reduce_op_count)
    text += " " + std::string(holmes::name(static_cast<ReduceOp>(header.reduction)));
  if (header.root >= 0) text += " root " + std::to_string(header.root);
  if (header.form != Form::flat)
    return text + ", hierarchical" + std::string(compression_suffix(header.form)) + ", of " +
           std::to_string(header.announced_bytes) + " bytes";
  return text + ", sending " + std::to_string(header.payload_bytes) + " and expecting " +
         std::to_string(header.expected_bytes) + " bytes";
}

void Collective::check_header(int peer) const {
  const Header& theirs = flows_[peer].in;
  const Header& mine = flows_[peer].out;
  const ControlLink& control = *group_.controls[peer];
  const ErrorContext context{.rank = group_.label(group_.rank),
                             .peer = group_.label(peer),
                             .host = control.host(),
                             .nic = control.nic(),
                             .system_errno = {}};
  if (theirs.magic != header_magic)
    throw ProtocolError("communicator '" + group_.name + "': the stream of " + control.describe() +
                            " does not hold an operation where one is due; all processes must run the same version",
                        context);
  const bool same = theirs.op == mine.op && theirs.dtype == mine.dtype && theirs.reduction == mine.reduction &&
                    theirs.root == mine.root && theirs.sequence == mine.sequence && theirs.form == mine.form &&
                    theirs.announced_bytes == mine.announced_bytes && theirs.slice_bytes == mine.slice_bytes &&
                    theirs.payload_bytes == mine.expected_bytes && theirs.expected_bytes == mine.payload_bytes;
  if (same) return;
  throw MismatchError("communicator '" + group_.name + "': " + control.describe() + " called " + describe(theirs) +
                          ", but rank " + std::to_string(group_.label(group_.rank)) + " called " + describe(mine) +
                          " with it; all ranks must call the same operations in the same order with the same dtype, "
                          "count, reduction and root",
                      context);
}

std::vector<PeerProgress> Collective::progress() const {
  const auto payload = [](std::size_t bytes) { return bytes > sizeof(Header) ? bytes - sizeof(Header) : 0; };
  std::vector<PeerProgress> missing;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || flows_.empty() || !involves(peer)) continue;
    const Flow& flow = flows_[peer];
    missing.push_back({peer, flow.in_bytes >= sizeof(Header) || flow.in_total == 0, payload(flow.in_bytes),
                       payload(flow.in_total), payload(flow.out_bytes), payload(flow.out_total)});
  }
  return missing;
}

RecordedCall Collective::recorded_call() const {
  return {.op = signature_.op,
          .dtype = signature_.dtype,
          .reduction = signature_.reduction,
          .root = signature_.root,
          .sequence = signature_.sequence,
          .count = signature_.count};
}

std::string Collective::describe_wait(const std::vector<char>& entered) const {
  std::string text;
  std::string waiting;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank || flows_.empty()) continue;
    const Flow& flow = flows_[peer];
    const bool is_heard = flow.in_bytes >= sizeof(Header);
    std::string what;
    if (!is_heard && !entered[static_cast<std::size_t>(peer)]) {
      what = "has not entered it";
    } else if (!is_heard && flow.in_total > 0) {
      waiting += (waiting.empty() ? "" : "; ") + group_.controls[peer]->describe() + ": in it, nothing received yet";
    } else if (flow.in_bytes < flow.in_total) {
      what = std::to_string(received_bytes(peer)) + " of " + std::to_string(flow.in_total - sizeof(Header)) +
             " bytes received";
    } else if (flow.out_bytes < flow.out_total && may_send(peer)) {
      what = "takes no more data (" + std::to_string(flow.out_bytes) + " of " + std::to_string(flow.out_total) +
             " bytes sent)";
    }
    if (!what.empty()) text += (text.empty() ? "" : "; ") + group_.controls[peer]->describe() + ": " + what;
  }
  if (text.empty()) text = waiting;
  return text.empty() ? "nobody" : text;
}

}  // namespace holmes
