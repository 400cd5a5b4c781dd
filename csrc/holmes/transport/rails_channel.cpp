#include "holmes/transport/rails_channel.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

// A rail without traffic gets a copy of a chunk now and then, to learn whether it has become faster.
constexpr auto rate_expiry = std::chrono::milliseconds(100);
constexpr std::size_t scratch_bytes = 64 * 1024;
// In the sockets of all far rails: until the sending thread looks again.
constexpr std::size_t most_far_unsent_bytes = 4 * max_chunk_bytes;

// Copies `bytes` of `pieces`, from `skip` on, to `to`.
void gather(std::span<const iovec> pieces, std::size_t skip, std::size_t bytes, std::byte* to) {
  for (const iovec& piece : pieces) {
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    const std::size_t part = std::min(piece.iov_len - skip, bytes);
    std::memcpy(to, static_cast<const std::byte*>(piece.iov_base) + skip, part);
    to += part;
    bytes -= part;
    skip = 0;
    if (bytes == 0) return;
  }
}

constexpr auto copies_interval = std::chrono::milliseconds(10);
constexpr auto health_interval = std::chrono::milliseconds(100);
// Where one connection ended and others have not: how long to wait whether the whole stream ends.
constexpr auto end_grace = std::chrono::milliseconds(300);
constexpr auto shortest_pause = std::chrono::microseconds(500);
constexpr auto longest_pause = std::chrono::milliseconds(10);

}  // namespace

class RailsChannel::Sink {
public:
  explicit Sink(std::span<const iovec> pieces) : left_bytes_(total_bytes(pieces)) {
    for (const iovec& piece : pieces)
      if (piece.iov_len > 0 && count_ < max_pieces) pieces_[count_++] = piece;
  }
  std::size_t left_bytes() const { return left_bytes_; }
  std::size_t taken_bytes() const { return taken_bytes_; }
  // The first `bytes` of what is left.
  std::span<const iovec> front(std::size_t bytes) {
    std::size_t used = 0;
    for (std::size_t i = first_; i < count_ && bytes > 0; ++i) {
      selected_[used] = {pieces_[i].iov_base, std::min(pieces_[i].iov_len, bytes)};
      bytes -= selected_[used++].iov_len;
    }
    return {selected_.data(), used};
  }
  void advance(std::size_t bytes) {
    left_bytes_ -= bytes;
    taken_bytes_ += bytes;
    while (bytes > 0) {
      iovec& piece = pieces_[first_];
      const std::size_t part = std::min(piece.iov_len, bytes);
      piece = {static_cast<std::byte*>(piece.iov_base) + part, piece.iov_len - part};
      bytes -= part;
      if (piece.iov_len == 0) ++first_;
    }
  }

private:
  std::array<iovec, max_pieces> pieces_;
  std::array<iovec, max_pieces> selected_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
  std::size_t left_bytes_;
  std::size_t taken_bytes_ = 0;
};

RailsChannel::RailsChannel(int peer, std::vector<Connection> sockets, std::shared_ptr<RailsContext> context)
    : Channel(peer),
      context_(std::move(context)),
      used_count_(static_cast<std::size_t>(
          std::ranges::count_if(sockets, [](const Connection& socket) { return !socket.is_reserve; }))),
      shares_path_(used_count_ < sockets.size()),
      received_at_(Clock::now()),
      health_check_at_(received_at_) {
  int index = 0;
  for (Connection& socket : sockets) rails_.push_back(std::make_unique<Rail>(std::move(socket), index++));
  // What one connection carries that takes each lost packet for a full path is far from what the path would.
  if (rails_.front()->is_far() && rails_.front()->heeds_loss()) used_count_ = rails_.size();
  if (used_count_ > 1) limit_unsent();
}

// What waits in a socket whose window is small is what an operation waits for at its end: the more rails, the less in
// each of them.
void RailsChannel::limit_unsent() {
  for (const auto& rail : used()) rail->limit_unsent(most_far_unsent_bytes / used_count_);
}

// Uses reserves where they are needed: what one's buffer does not hold, another's may.
void RailsChannel::use_reserves() {
  constexpr std::size_t factor = 4;
  if (used_count_ == rails_.size()) return;
  bool any_living = false;
  bool all_full = true;
  for (const auto& rail : used()) {
    if (!rail->is_living()) continue;
    any_living = true;
    all_full &= rail->bound().is_buffer();
  }
  if (!all_full) return;
  const std::size_t before = std::exchange(used_count_, std::min(rails_.size(), used_count_ * factor));
  if (any_living)
    tell_reserves(before);
  else
    used_count_ = rails_.size();
  limit_unsent();
  for (const auto& rail : used()) rail->look_anew();
}

void RailsChannel::tell_reserves(std::size_t before) const {
  if (!log_enabled(LogLevel::info)) return;
  const ConnectionInfo& info = rails_.front()->info();
  const std::string of = before == 1 ? "one connection" : std::to_string(before) + " connections";
  log(LogLevel::info, context_->label(context_->own_rank),
      "communicator '" + context_->communicator + "': the path to rank " + std::to_string(context_->label(peer())) +
          " (host " + info.host + ") over NIC " + info.interface + " takes more than the buffer of " + of + "; " +
          std::to_string(used_count_) + " " + info.purpose + " connections share the stream from now on");
}

std::size_t RailsChannel::lead_bytes() {
  double path_bytes = 0;
  for (const auto& rail : used()) path_bytes += rail->path_bytes();
  return std::max(min_lead_bytes * used_count_, static_cast<std::size_t>(2 * path_bytes));
}

std::size_t RailsChannel::try_send(std::span<const iovec> pieces) {
  const auto now = Clock::now();
  maintain(now);
  const std::uint64_t end = sent_position_ + total_bytes(pieces);
  assign(pieces, end, now);
  const std::uint64_t position = std::min(first_unwritten(), end);
  const std::size_t sent = position > sent_position_ ? position - sent_position_ : 0;
  if (sent == 0 && !has_living()) throw_closed();
  sent_position_ += sent;
  count_sent(sent);
  return sent;
}

// Cuts what is offered into chunks and gives them to rails, as long as these have room.
void RailsChannel::assign(std::span<const iovec> pieces, std::uint64_t end, Clock::time_point now) {
  while (assigned_position_ < end && again_.empty() && is_window_open()) {
    const std::uint64_t left = end - assigned_position_;
    Rail* rail = choose_rail(std::min<std::uint64_t>(left, max_chunk_bytes));
    if (!rail) return;
    Rail* const idle = find_idle_rail(*rail, now);
    const std::size_t longest =
        idle ? std::clamp(rail->chunk_bytes(), RailRate::telling_bytes, max_chunk_bytes / 2) : rail->chunk_bytes();
    Chunk chunk{pool_.take(), assigned_position_};
    chunk.frame->header.bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(longest, left));
    chunk.frame->header.sequence = next_sequence_++;
    gather(pieces, assigned_position_ - sent_position_, chunk.frame->header.bytes, chunk.frame->payload.data());
    assigned_position_ += chunk.frame->header.bytes;
    if (idle) {
      Chunk copy{pool_.take(), chunk.begin_bytes};
      std::memcpy(copy.frame.get(), chunk.frame.get(), chunk.frame->wire_bytes());
      idle->push(std::move(copy), now);
    }
    rail->push(std::move(chunk), now);
  }
}

// The rail on which `bytes` more would arrive first; null where that one has no room now and waiting for it is better
// than any other.
Rail* RailsChannel::choose_rail(std::size_t bytes) const {
  // A connection that was in reserve begins with a small window, which grows only by what it is given.
  // If chunks waited for the first one instead, it would stay slow.
  return first_to_deliver(used(), !shares_path_,
                          [bytes](const Rail& rail) { return rail.arrival_s(std::min(bytes, rail.chunk_bytes())); });
}

Rail* RailsChannel::find_idle_rail(const Rail& chosen, Clock::time_point now) const {
  for (const auto& rail : used())
    if (rail.get() != &chosen && rail->is_living() && rail->bytes_per_s() && rail->is_idle_for(rate_expiry, now))
      return rail.get();
  return nullptr;
}

// Sends what one far connection will deliver late over another one too: what is in its socket cannot be taken back, and
// all others wait for it, at the end of an operation or where they are a whole window ahead. One that has become slow
// has bytes for seconds there.
void RailsChannel::copy_late(Clock::time_point now) {
  constexpr double late_factor = 2;
  constexpr double late_s = 0.5;  // the rate of a connection that begins is known too late, and one lost packet is none
  constexpr double late_round_trips = 4;  // a lost packet may take three
  if (used_count_ < 2 || now < copies_at_) return;
  copies_at_ = now + copies_interval;
  for (const auto& rail : used()) {
    const double least_s = std::max(late_s, late_round_trips * rail->min_rtt_s());
    if (!rail->is_living() || !rail->is_far() || rail->arrival_s(0) < least_s) continue;
    rail->visit_unacknowledged([&](Chunk& chunk, double left_s) {
      const FrameHeader& header = chunk.frame->header;
      if (chunk.is_copied || header.kind != FrameKind::data) return;
      Rail* const other = find_faster(*rail, header.bytes, (left_s - least_s) / late_factor);
      if (!other) return;
      Chunk copy{pool_.take(), chunk.begin_bytes};
      std::memcpy(copy.frame.get(), chunk.frame.get(), chunk.frame->wire_bytes());
      chunk.is_copied = true;
      other->push(std::move(copy), now);
    });
  }
}

// The one on which `bytes` more would arrive first, before `limit_s`; null where there is none.
Rail* RailsChannel::find_faster(const Rail& slow, std::size_t bytes, double limit_s) const {
  Rail* found = nullptr;
  for (const auto& rail : used()) {
    if (rail.get() == &slow || !rail->bytes_per_s() || !rail->has_room()) continue;
    const double arrival_s = rail->arrival_s(bytes);
    if (arrival_s >= limit_s) continue;
    found = rail.get();
    limit_s = arrival_s;
  }
  return found;
}

bool RailsChannel::is_window_open() {
  if (next_sequence_ - oldest_sequence_ < window_chunks) return true;
  std::uint64_t oldest = next_sequence_;
  for (const auto& rail : rails_)
    if (const auto sequence = rail->oldest_sequence()) oldest = std::min(oldest, *sequence);
  oldest_sequence_ = oldest;
  return next_sequence_ - oldest_sequence_ < window_chunks;
}

std::uint64_t RailsChannel::first_unwritten() const {
  std::uint64_t position = assigned_position_;
  for (const auto& rail : rails_)
    if (const auto first = rail->first_unwritten()) position = std::min(position, *first);
  for (std::size_t i = 0; i < again_.size(); ++i) position = std::min(position, again_[i].begin_bytes);
  return position;
}

std::size_t RailsChannel::try_recv(std::span<const iovec> pieces) {
  Sink sink(pieces);
  bool moved = true;
  bool any = false;
  while (moved && sink.left_bytes() > 0) {
    moved = deliver(sink);
    for (const auto& rail : rails_)
      if (sink.left_bytes() > 0) moved |= receive(*rail, sink);
    // What is early costs one more copy: it stays in its socket as long as there is anything else to do.
    for (const auto& rail : rails_)
      if (!moved && sink.taken_bytes() == 0) moved |= receive_early(*rail);
    any |= moved;
  }
  if (any) received_at_ = Clock::now();
  if (sink.taken_bytes() == 0 && sink.left_bytes() > 0 && !any && !has_living()) throw_closed();
  count_received(sink.taken_bytes());
  return sink.taken_bytes();
}

// Copies out what came early and is due now.
bool RailsChannel::deliver(Sink& sink) {
  bool moved = false;
  while (sink.left_bytes() > 0) {
    const Frame* due = received_.due();
    if (!due) break;
    // Part of it came by another rail.
    if (due_bytes_ != 0) check_header(due->header);
    const std::size_t bytes = std::min(due->header.bytes - delivered_bytes_, sink.left_bytes());
    const std::byte* from = due->payload.data() + delivered_bytes_;
    for (const iovec& piece : sink.front(bytes)) {
      std::memcpy(piece.iov_base, from, piece.iov_len);
      from += piece.iov_len;
    }
    sink.advance(bytes);
    delivered_bytes_ += bytes;
    due_bytes_ = due->header.bytes;
    moved = true;
    if (delivered_bytes_ == due->header.bytes) finish_due();
  }
  return moved;
}

void RailsChannel::finish_due() {
  pool_.give(received_.advance());
  delivered_bytes_ = due_bytes_ = 0;
}

// Goes on with what arrives on a rail, unless that is a chunk before its turn. Returns whether anything moved.
bool RailsChannel::receive(Rail& rail, Sink& sink) {
  Rail::Incoming& in = rail.incoming();
  if (!rail.read_header()) return false;
  if (in.payload_bytes == 0) {
    check_crc(rail);
    check_header(in.header);
  }
  if (in.header.kind == FrameKind::retire) {
    Rail& lost = *rails_[in.header.rail];
    rail.finish_frame();
    if (lost.state() != Rail::State::retired) retire(lost, "the peer reports it lost", false, Clock::now());
    return true;
  }
  bool moved = false;
  if (received_.is_known(in.header.sequence)) {
    pool_.give(std::move(in.frame));
    moved = discard(rail, in.left_bytes());
  } else if (in.header.sequence != received_.next()) {
    return false;
  } else if (in.frame) {
    return receive_early(rail);  // it was early when it began
  } else {
    moved = receive_due(rail, sink);
  }
  if (in.left_bytes() == 0) rail.finish_frame();
  return moved;
}

void RailsChannel::check_crc(Rail& rail) const {
  const FrameHeader& header = rail.incoming().header;
  if (header.magic != FrameHeader::right_magic || header.crc == header.right_crc()) return;
  throw IntegrityError("communicator '" + context_->communicator + "': a frame's header has changed on its way from " +
                           describe_peer(context_->label(peer()), rail.info().host, rail.info().interface) +
                           " to rank " + std::to_string(context_->label(context_->own_rank)) + integrity_advice,
                       {.rank = context_->label(context_->own_rank),
                        .peer = context_->label(peer()),
                        .host = rail.info().host,
                        .nic = rail.info().interface,
                        .system_errno = {}});
}

void RailsChannel::check_header(const FrameHeader& header) const {
  const bool is_retire =
      header.kind == FrameKind::retire && header.bytes == 0 && static_cast<std::size_t>(header.rail) < rails_.size();
  const bool is_data = header.kind == FrameKind::data && header.bytes > 0 && header.bytes <= max_chunk_bytes;
  const bool fits = due_bytes_ == 0 || header.sequence != received_.next() || header.bytes == due_bytes_;
  if (header.magic == FrameHeader::right_magic && (is_retire || (is_data && fits))) return;
  throw ProtocolError("communicator '" + context_->communicator + "': rank " + std::to_string(context_->label(peer())) +
                          " sent a frame of kind " + std::to_string(static_cast<int>(header.kind)) + ", " +
                          std::to_string(header.bytes) + " bytes, number " + std::to_string(header.sequence) +
                          " where chunk " + std::to_string(received_.next()) +
                          " is due; all processes must run the same version",
                      {.rank = context_->label(context_->own_rank),
                       .peer = context_->label(peer()),
                       .host = {},
                       .nic = {},
                       .system_errno = {}});
}

// Straight into the caller's memory, less what another rail has brought of this chunk already.
bool RailsChannel::receive_due(Rail& rail, Sink& sink) {
  Rail::Incoming& in = rail.incoming();
  if (in.payload_bytes < delivered_bytes_) return discard(rail, delivered_bytes_ - in.payload_bytes);
  const std::size_t got = rail.read_payload(sink.front(std::min(in.left_bytes(), sink.left_bytes())));
  if (got == 0) return false;
  sink.advance(got);
  due_bytes_ = in.header.bytes;
  delivered_bytes_ += got;
  if (delivered_bytes_ == due_bytes_) finish_due();
  return true;
}

// Into memory. Returns whether anything moved; nothing where the rail's chunk is not early, or there is no room for it.
bool RailsChannel::receive_early(Rail& rail) {
  Rail::Incoming& in = rail.incoming();
  if (!in.has_header() || !received_.has_room_for(in.header.sequence)) return false;
  if (!in.frame) {
    in.frame = pool_.take();
    in.frame->header = in.header;
  }
  const iovec piece{in.frame->payload.data() + in.payload_bytes, in.left_bytes()};
  if (rail.read_payload({&piece, 1}) == 0) return false;
  if (in.left_bytes() > 0) return true;
  if (!received_.insert(in.frame)) pool_.give(std::move(in.frame));
  rail.finish_frame();
  return true;
}

bool RailsChannel::discard(Rail& rail, std::size_t bytes) {
  if (scratch_.empty()) scratch_.resize(scratch_bytes);
  const iovec piece{scratch_.data(), std::min(bytes, scratch_.size())};
  return rail.read_payload({&piece, 1}) > 0;
}

bool RailsChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) {
  awaits_recv_ = for_recv;
  awaits_send_ = for_send;
  bool block = true;
  for (const auto& rail : rails_) {
    const auto& in = rail->incoming();
    // A chunk for which there is no room would wake for nothing.
    const bool has_room = !in.has_header() || in.frame || received_.is_known(in.header.sequence) ||
                          received_.has_room_for(in.header.sequence);
    const bool reads = for_recv && !rail->has_ended() && has_room;
    const bool writes = for_send && rail->is_living() && rail->has_unwritten() && !rail->pauses();
    const short events = static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0));
    if (events) fds.push_back({rail->fd(), events, 0});
    block &= !reads || !rail->may_hold_input();
  }
  return block;
}

void RailsChannel::shutdown() {
  for (const auto& rail : rails_) rail->shutdown();
}

void RailsChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  for (const auto& rail : rails_) rail->append_info(infos);
}

bool RailsChannel::has_living(const Rail* except) const {
  return std::any_of(rails_.begin(), rails_.end(),
                     [&](const auto& rail) { return rail.get() != except && rail->is_living(); });
}

void RailsChannel::throw_closed() const {
  int error = 0;
  for (const auto& rail : rails_)
    if (rail->error() != 0) error = rail->error();
  throw StreamClosed{peer(), error};
}

// Where rails were lost, the living ones may be dead too without telling.
bool RailsChannel::tells_end() const {
  const bool all_living = std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->is_living(); });
  return all_living || Clock::now() - received_at_ < context_->timeout;
}

void RailsChannel::maintain(Clock::time_point now) {
  for (const auto& rail : rails_) {
    rail->collect(now, pool_);
    rail->flush();
  }
  use_reserves();
  copy_late(now);
  if (now >= health_check_at_) {
    health_check_at_ = now + health_interval;
    check_health(now);
  }
  send_again(now);
}

std::optional<Clock::time_point> RailsChannel::next_maintenance(Clock::time_point now) {
  const bool is_stalled = !again_.empty() || std::any_of(rails_.begin(), rails_.end(), [](const auto& rail) {
    return rail->is_living() && rail->has_unwritten();
  });
  const bool is_watching =
      awaits_recv_ || awaits_send_ || is_stalled ||
      std::any_of(rails_.begin(), rails_.end(),
                  [](const auto& rail) { return rail->is_living() && rail->outstanding_bytes() > 0; }) ||
      (has_living() && std::any_of(rails_.begin(), rails_.end(),
                                   [](const auto& rail) { return rail->state() == Rail::State::broken; }));
  if (!is_watching) return std::nullopt;
  auto at = std::max(health_check_at_, now + shortest_pause);
  if (is_stalled) at = std::min<Clock::time_point>(at, now + longest_pause);
  for (const auto& rail : rails_) at = *earliest({at, rail->next_look()});
  if (!awaits_send_) return at;
  // Nothing tells when the peer has acknowledged enough for more.
  for (const auto& rail : rails_) {
    if (!rail->is_living() || rail->has_unwritten() || rail->outstanding_bytes() == 0) continue;
    const auto pause = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(rail->room_s()));
    at = std::min(at, now + std::clamp<Clock::duration>(pause, shortest_pause, longest_pause));
  }
  return at;
}

void RailsChannel::check_health(Clock::time_point now) {
  for (const auto& rail : rails_) {
    rail->check_connection(now);
    if (rail->state() == Rail::State::retired || !has_living(rail.get())) continue;
    if (rail->state() == Rail::State::broken) {
      const int error = rail->error();
      if (now - rail->broken_at() >= end_grace)
        retire(*rail, error != 0 ? errno_text(error) : "the connection was closed", true, now);
    } else if (shares_path_ && !is_outlived(*rail)) {
      // No other connection would do better.
    } else if (rail->is_interface_down()) {
      retire(*rail, "the interface is down", true, now);
    } else if (rail->is_stuck(context_->timeout, now)) {
      const auto silent_s = std::chrono::duration<double>(context_->timeout).count();
      retire(*rail, "no acknowledgement for " + std::to_string(silent_s).substr(0, 4) + " s", true, now);
    }
  }
}

// Another rail was acknowledged long after this one.
bool RailsChannel::is_outlived(const Rail& rail) const {
  return std::ranges::any_of(rails_, [&](const auto& other) {
    return other.get() != &rail && other->is_living() &&
           other->acknowledged_at() - rail.progress_at() > context_->timeout / 2;
  });
}

// Rails of several NICs are several paths, and lost one by one.
bool RailsChannel::is_unanswered() const {
  if (!shares_path_) return false;
  bool any = false;
  for (const auto& rail : rails_) {
    if (!rail->is_living()) continue;
    if (rail->is_unanswered())
      any = true;
    else if (rail->outstanding_bytes() > 0)
      return false;
  }
  return any;
}

void RailsChannel::retire(Rail& rail, const std::string& reason, bool tell_peer, Clock::time_point now) {
  // Both sides may have lost another one: then each goes on sending on what it has.
  if (!has_living(&rail)) return;
  rail.collect(now, pool_);
  ChunkQueue lost = rail.retire();
  warn_of(rail, reason, lost.size());
  if (tell_peer) {
    Chunk notice{pool_.take(), assigned_position_};
    notice.frame->header.kind = FrameKind::retire;
    notice.frame->header.rail = static_cast<std::uint8_t>(rail.index());
    again_.push_back(std::move(notice));
  }
  while (!lost.empty()) {
    again_.push_back(lost.pop_front());
    again_[again_.size() - 1].is_copied = false;
  }
  send_again(now);
}

void RailsChannel::send_again(Clock::time_point now) {
  while (!again_.empty()) {
    Rail* rail = choose_rail(again_[0].frame->header.bytes);
    if (!rail) return;
    rail->push(again_.pop_front(), now);
  }
}

void RailsChannel::warn_of(const Rail& rail, const std::string& reason, std::size_t chunks) const {
  std::string others;
  for (const auto& other : rails_)
    if (other->is_living()) add_word(others, other->info().interface);
  context_->warn_of_loss(peer(), rail.info(), reason, others, std::to_string(chunks) + " chunks are");
}

}  // namespace holmes
