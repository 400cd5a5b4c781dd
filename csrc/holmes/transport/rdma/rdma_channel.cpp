#include "holmes/transport/rdma/rdma_channel.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

// Bytes of a message, but for a last one that is half of it longer. Of a send the HCA is given the first one by itself,
// to send it while this side copies the others.
constexpr std::size_t message_bytes = 128 * 1024;
// Bytes after which a peer that sleeps is woken though more follow: it copies these while the others come. (Those of a
// call wake it with the last, so that it is not woken for each message.)
constexpr std::size_t wake_bytes = 1024 * 1024;
// From so many on it is worth waiting for the HCA to have sent it; and of one message of it at most, of which the peer
// hears once all of it is there.
constexpr std::size_t least_lent_bytes = 64 * 1024;
constexpr std::size_t lent_message_bytes = 256 * 1024;
// Of an offer at most: what each side locks for a peer beside its rings.
constexpr std::size_t max_offer_bytes = 8 * 1024 * 1024;
// Where several lanes read what is offered: of a piece at least, and how many of them each lane gets on average.
constexpr std::size_t least_piece_bytes = 64 * 1024;
constexpr std::size_t pieces_of_a_lane = 4;
// While it waits, how often it asks whether the path lives: a link that is cut tells only those who send.
constexpr auto port_look_interval = std::chrono::seconds(1);
constexpr int inactive_looks = 2;  // a port may flap
// While one is left, whether what is due can be sent; and how long an HCA may take to end what is under way.
constexpr auto catch_up_interval = std::chrono::milliseconds(10);
constexpr auto longest_drain = std::chrono::seconds(2);
constexpr auto longest_linger = std::chrono::seconds(2);
constexpr auto linger_look = std::chrono::milliseconds(50);

int errno_of(verbs::Status status) {
  switch (status) {
    case verbs::Status::retries_exceeded:
    case verbs::Status::receiver_not_ready:
    case verbs::Status::response_timeout:
      return ETIMEDOUT;
    case verbs::Status::flushed:
    case verbs::Status::remote_invalid_request:
    case verbs::Status::remote_access:
    case verbs::Status::remote_operation:
      return ECONNRESET;
    default:
      return EIO;
  }
}

}  // namespace

RdmaChannel::RdmaChannel(int peer, std::vector<std::unique_ptr<RdmaQueuePair>> pairs, std::vector<Connection> sockets,
                         std::shared_ptr<RailsContext> context)
    : Channel(peer),
      sockets_(std::move(sockets)),
      lost_sockets_(sockets_.size()),
      context_(std::move(context)),
      rings_(*pairs.front()->rings()),
      epoch_(fork_epoch()),
      direct_bytes_(pairs.front()->device().library().survives_fork()
                        ? pairs.front()->device().settings().rdma_direct_bytes
                        : SIZE_MAX) {
  for (auto& pair : pairs) {
    lanes_.push_back(std::make_unique<RdmaLane>(std::move(pair), lanes_.size(), sockets_.front().info));
    lanes_.back()->has_company = pairs.size() > 1;
  }
}

RdmaChannel::~RdmaChannel() {
  if (epoch_ != fork_epoch()) return;  // all of it is the parent's
  let_go();
  if (is_shut_down_.load()) where_memory_allows([this] { linger(); });
}

void RdmaChannel::start_proof() {
  for (const auto& lane : lanes_) {
    lane->asked = lane->posted();
    if (const int error = lane->post({.is_signaled = true}, position_on(*lane))) fail(error, *lane, errno_text(error));
  }
}

const ConnectionInfo* RdmaChannel::look_for_proof() {
  for (const auto& lane : lanes_) {
    lane->pair().take_events();
    lane->pair().arm(RdmaQueuePair::Wake::any);
  }
  look_for_sends();
  look_for_trouble(Clock::now());
  if (error_ != 0) {
    const ConnectionInfo& info = failed_->info();
    throw UnreachableError("rank " + std::to_string(peer()) + " (host " + info.host +
                               ") does not answer over RDMA: " + info.interface + " " + info.local_address + " -> " +
                               info.remote_address + ": " + errno_text(error_) +
                               "; check that the two ports are of one fabric, that their GIDs, MTUs, P_Keys and VLANs "
                               "fit (HOLMES_RDMA_...), and that the switches let RoCE pass; or use transport tcp",
                           {.peer = peer(), .host = info.host, .nic = info.interface, .system_errno = error_});
  }
  for (const auto& lane : lanes_)
    if (lane->asked) return &lane->info();
  is_proven_ = true;
  return nullptr;
}

std::vector<std::string> RdmaChannel::paths() const {
  std::vector<std::string> all;
  for (const auto& lane : lanes_) all.push_back(lane->pair().path_to(lane->pair().peer()));
  return all;
}

std::vector<std::string> RdmaChannel::silent_paths(bool is_over) const {
  std::vector<std::string> silent = paths();
  std::erase_if(silent, [&, number = std::size_t{0}](const std::string&) mutable {
    const RdmaLane& lane = *lanes_[number++];
    const bool has_given_up = &lane == failed_ && error_ == ETIMEDOUT;
    return !has_given_up && !(is_over && lane.asked);
  });
  return silent;
}

// Where rates matter.
std::optional<Clock::time_point> RdmaChannel::clock() const {
  return lanes_.size() > 1 ? std::optional(Clock::now()) : std::nullopt;
}

// What was not posted can be later, or the path is lost.
void RdmaChannel::fail_post(RdmaLane& lane, int error) {
  if (error != 0 && error != EAGAIN && error != ENOMEM) lose(lane, error, "a send is refused: " + errno_text(error));
}

std::size_t RdmaChannel::sendable_bytes(std::uint64_t more) const {
  if (!is_ready() || !main().has_message(more)) return 0;
  return rings_.bytes() - (sent_to_ - std::min(credit_bytes_, completed_to_));
}

std::size_t RdmaChannel::try_send(std::span<const iovec> pieces) { return send(pieces, false); }

std::size_t RdmaChannel::send(std::span<const iovec> pieces, bool is_followed) {
  const std::size_t wanted = std::min(total_bytes(pieces), rings_.bytes());
  if (error_ != 0 || is_closed_by_peer_ || has_ended_) {
    if (error_ == 0) look_for_receives();
    throw_if_ended();
  }
  std::size_t sent = 0;
  while (sent < wanted) {
    if (sendable_bytes() < std::min(wanted - sent, message_bytes)) {
      look_for_receives();
      look_for_sends();
      if (sent == 0) throw_if_ended();
    }
    const std::size_t bytes = send_messages(pieces, sent, wanted - sent, is_followed);
    if (bytes == 0) break;
    sent += bytes;
  }
  refused_bytes_ -= std::min(refused_bytes_, sent);
  count_sent(sent);
  return sent;
}

// Of what follows the first `skip` bytes; returns how much of it, 0 where there is no room.
std::size_t RdmaChannel::send_messages(std::span<const iovec> pieces, std::size_t skip, std::size_t most,
                                       bool is_followed) {
  Writes writes;
  const std::size_t at_once = skip == 0 ? 1 : writes.size() - 1;
  std::size_t count = 0;
  std::size_t sent = 0;
  for (; count < at_once && sent < most; ++count) {
    RdmaQueuePair::Write& write = writes[count];
    write = fill_message(pieces, skip + sent, most - sent, is_followed);
    if (write.bytes == 0) break;
    sent += write.bytes;
  }
  if (count == 0) return 0;
  if (is_followed && count == 1 && sent == most) {
    held_ = writes.front();
    return sent;
  }
  post_messages(writes, count);
  return sent;
}

// The first `count`, which are counted, and a credit that is due.
void RdmaChannel::post_messages(Writes& writes, std::size_t count) {
  RdmaLane& lane = main();
  RdmaCredit credit;
  if (is_credit_due(4) && lane.has_request()) {
    writes[count++] = credit_message(credit);
    lane.count_request(false, posted_to_);
    count_credit(credit);
  }
  if (const int error = lane.pair().post_all({writes.data(), count})) {  // there was room for all of them
    lose(lane, error, "a send is refused: " + errno_text(error));
    if (error_ != 0) throw_if_ended();
  }
}

// The last piece from where it is, where that is registered; what is before it by the ring, in the same call of the
// HCA.
std::size_t RdmaChannel::send_lent(std::span<const iovec> pieces) {
  const iovec& last = pieces.back();
  if (sendable_bytes() < total_bytes(pieces)) {
    look_for_receives();
    look_for_sends();
  }
  const RdmaLane& lane = main();
  SharedRegion region = is_ready() ? lane.pair().region_of_buffer(last) : nullptr;
  if (!region) return try_send(pieces);
  const auto before = pieces.first(pieces.size() - 1);
  const std::size_t left = total_bytes(before);
  const std::size_t sent = left > 0 ? send(before, true) : 0;
  if (sent < left) return sent;  // the ring is full, which has woken the peer
  if (&lane != &main()) {        // lost meanwhile
    post_held();
    return sent;
  }
  Writes writes;
  std::size_t count = 0;
  if (held_) writes[count++] = *std::exchange(held_, std::nullopt);
  std::size_t bytes = 0;
  for (; count < writes.size() - 1 && bytes < last.iov_len; ++count) {
    const std::size_t at = sent_to_ & (rings_.bytes() - 1);
    const std::size_t room =
        std::min({sendable_bytes(), lent_message_bytes, last.iov_len - bytes, rings_.bytes() - at});
    if (room == 0) break;
    sent_to_ += room;
    writes[count] = next_message(room);
    writes[count].from = static_cast<const std::byte*>(last.iov_base) + bytes;
    writes[count].region = region.get();
    bytes += room;
  }
  if (count == 0) {
    if (sent == 0) throw_if_ended();
    return sent;
  }
  writes[count - 1].is_solicited = true;
  woken_to_ = sent_to_;
  if (bytes > 0) {
    writes[count - 1].is_signaled = true;
    lent_ = Lent{{last.iov_base, bytes}, std::move(region), sent_to_};
  }
  post_messages(writes, count);
  return lent_ ? sent + take_lent() : sent;
}

// Its bytes, once the HCA has sent them; or once the peer has ended in order: it has had what it needed, and its
// acknowledgement may be what it did not wait for.
std::size_t RdmaChannel::take_lent() {
  if (!has_gone(*lent_)) look_for_sends();
  if (!has_gone(*lent_)) {
    look_for_receives();  // what the peer says of a lost lane
    if (!has_gone(*lent_)) {
      if (!has_ended_) return 0;
      for (const auto& lane : lanes_) lane->pair().stop();  // which may be sending it again
    }
  }
  const std::size_t bytes = lent_->memory.iov_len;
  lent_.reset();
  refused_bytes_ -= std::min(refused_bytes_, bytes);
  count_sent(bytes);
  return bytes;
}

// The next lane sends it again, and its memory is the user's again.
void RdmaChannel::copy_lent() {
  if (!lent_ || has_gone(*lent_)) return;
  const auto* const from = static_cast<const std::byte*>(lent_->memory.iov_base);
  const std::size_t at = (lent_->end - lent_->memory.iov_len) & (rings_.bytes() - 1);
  const std::size_t first = std::min(lent_->memory.iov_len, rings_.bytes() - at);
  std::memcpy(rings_.send_ring() + at, from, first);
  std::memcpy(rings_.send_ring(), from + first, lent_->memory.iov_len - first);
  lent_->is_copied = true;
}

// One message, which counts as posted; of no bytes where there is no room.
RdmaQueuePair::Write RdmaChannel::fill_message(std::span<const iovec> pieces, std::size_t skip, std::size_t most,
                                               bool is_followed) {
  const std::size_t at = sent_to_ & (rings_.bytes() - 1);
  const std::size_t goal = most <= message_bytes + message_bytes / 2 ? most : message_bytes;
  const std::size_t room = std::min({sendable_bytes(), goal, rings_.bytes() - at});
  std::size_t filled = 0;
  for (const iovec& piece : pieces) {
    if (filled == room) break;
    const std::size_t skipped = std::min(skip, piece.iov_len);
    skip -= skipped;
    const std::size_t bytes = std::min(piece.iov_len - skipped, room - filled);
    if (bytes > 0)
      std::memcpy(rings_.send_ring() + at + filled, static_cast<const std::byte*>(piece.iov_base) + skipped, bytes);
    filled += bytes;
  }
  if (filled == 0) return {};
  sent_to_ += filled;
  RdmaQueuePair::Write write = next_message(filled);
  // Without it only where another one follows for sure: a credit may be sent in between.
  write.is_solicited = (filled == most && !is_followed) || sent_to_ - woken_to_ >= wake_bytes || sendable_bytes(2) == 0;
  if (write.is_solicited) woken_to_ = sent_to_;
  return write;
}

// The next `bytes` that are in the ring and not posted, which lie in one piece there; they count as posted.
RdmaQueuePair::Write RdmaChannel::next_message(std::size_t bytes) {
  const std::size_t at = posted_to_ & (rings_.bytes() - 1);
  posted_to_ += bytes;
  RdmaLane& lane = main();
  const bool is_signaled = lane.is_signal_due(posted_to_);
  lane.count_request(is_signaled, posted_to_);
  ++lane.sent_messages;
  RdmaLane::count(lane.sent_bytes, bytes);
  return {.from = rings_.send_ring() + at,
          .bytes = bytes,
          .remote_offset = rings_.receive_offset() + at,
          .immediate = immediate(Kind::data, bytes),
          .is_signaled = is_signaled,
          .id = lane.posted()};
}

std::size_t RdmaChannel::try_recv(std::span<const iovec> pieces) {
  if (readable_bytes() == 0) look_for_receives();
  if (readable_bytes() == 0) {
    if (offer_ && !pull_) answer();  // the pieces may be gone once this returns
    seen_bytes_ = arrived_bytes_;
    throw_if_ended();
    return 0;
  }
  std::size_t received = 0;
  for (const iovec& piece : pieces) {
    const std::size_t bytes = std::min({piece.iov_len, readable_bytes(), max_call_bytes - received});
    if (bytes > 0) std::memcpy(piece.iov_base, rings_.receive_ring() + (consumed_bytes_ & (rings_.bytes() - 1)), bytes);
    consumed_bytes_ += bytes;
    received += bytes;
    if (bytes < piece.iov_len) break;
  }
  seen_bytes_ = arrived_bytes_;
  give_credit();
  count_received(received);
  return received;
}

std::size_t RdmaChannel::try_send_lasting(std::span<const iovec> pieces) {
  if (lent_) {
    const std::size_t gone = take_lent();
    if (gone == 0) throw_if_ended();
    return gone;
  }
  if (!offered_) {
    const bool is_offered = refused_bytes_ == 0 && pieces.back().iov_len >= direct_bytes_;
    return is_offered ? send_offered(pieces) : send_unoffered(pieces);
  }
  const auto taken = take_answer();
  return taken == 0 ? send_unoffered(pieces) : taken.value_or(0);
}

// How many of the offered bytes the peer has read; nothing: it has not answered yet.
std::optional<std::size_t> RdmaChannel::take_answer() {
  if (!offered_->answer) look_for_receives();
  if (!offered_->answer) {
    throw_if_ended();
    return std::nullopt;
  }
  const std::size_t taken = *offered_->answer;
  refused_bytes_ = offered_->memory.iov_len - taken;
  offered_.reset();
  count_sent(taken);
  return taken;
}

std::size_t RdmaChannel::try_send_staged(std::span<const iovec> pieces) {
  const iovec& last = pieces.back();
  const bool is_free = !lent_ && !offered_ && refused_bytes_ == 0;
  if (is_free && last.iov_len >= least_lent_bytes && is_staging(last)) return send_offered(pieces);
  return try_send_lasting(pieces);
}

// What is before the last piece goes by the ring, with the offer.
std::size_t RdmaChannel::send_offered(std::span<const iovec> pieces) {
  const auto before = pieces.first(pieces.size() - 1);
  const std::size_t left = total_bytes(before);
  const std::size_t sent = left > 0 ? send(before, true) : 0;
  if (sent < left) return sent;  // the ring is full, which has woken the peer
  offer(pieces.back());
  post_held();
  return offered_ ? sent : sent + try_send(pieces.last(1));
}

// Through the peer's ring; through this side's, too, where it is not registered.
std::size_t RdmaChannel::send_unoffered(std::span<const iovec> pieces) {
  return pieces.back().iov_len < least_lent_bytes ? try_send(pieces) : send_lent(pieces);
}

// Whether it is registered anyhow, so that little is offered too.
bool RdmaChannel::is_staging(const iovec& piece) const {
  if (direct_bytes_ == SIZE_MAX) return false;
  const RdmaQueuePair& pair = main().pair();
  if (pair.region_of_buffer(piece)) return true;
  static std::atomic<bool> is_told{false};
  if (!is_told.exchange(true))
    log(LogLevel::warn, std::nullopt,
        pair.refused_text(LastingMemory::find(piece.iov_base, piece.iov_len).bytes, ENOMEM) +
            "; until then a GPU's messages are copied once more on each host. Such rings and shared buffers take a "
            "quarter of the limit at most: lower HOLMES_PINNED_RING_BYTES where it cannot be raised; this is said "
            "once");
  return false;
}

std::size_t RdmaChannel::try_recv_lasting(iovec piece) {
  if (!pull_ && readable_bytes() == 0) look_for_receives();
  if (!pull_ && readable_bytes() == 0 && offer_) start_pull(piece);
  if (!pull_ && (offer_ || readable_bytes() > 0)) return try_recv({&piece, 1});
  if (!pull_) {  // try_recv would look again, and refuse an offer that has come just now
    seen_bytes_ = arrived_bytes_;
    throw_if_ended();
    return 0;
  }
  return take_pull();
}

// Its bytes, once all of them are there.
std::size_t RdmaChannel::take_pull() {
  look_for_sends();
  ask_for_pull();
  if (!pull_->is_done()) look_for_sends();
  if (!pull_->is_done()) {
    throw_if_ended();
    return 0;
  }
  const std::size_t received = pull_->memory.iov_len;
  pulled_bytes_ = pull_->is_answered ? 0 : pulled_bytes_ + received;
  pull_.reset();
  if (offer_ && pulled_bytes_ == offer_->bytes) answer();
  count_received(received);
  return received;
}

bool RdmaChannel::takes_device_memory(int gpu) const {
  if (direct_bytes_ == SIZE_MAX) return false;
  return main().pair().device().takes_device_memory(gpu);
}

// What of it was refused has to come from host memory.
Channel::DeviceMove RdmaChannel::try_send_device(iovec memory, int gpu) {
  if (refused_bytes_ > 0) return {0, true};
  if (!offered_) {
    throw_if_ended();
    offer(memory, gpu);
    return {0, refused_bytes_ > 0};
  }
  const auto taken = take_answer();
  return {taken.value_or(0), taken && refused_bytes_ > 0};
}

// What comes by the ring is refused, and what this GPU's memory cannot be registered for.
Channel::DeviceMove RdmaChannel::try_recv_device(iovec memory, int gpu) {
  if (!pull_ && readable_bytes() == 0) look_for_receives();
  if (!pull_ && readable_bytes() > 0) return {0, true};
  if (!pull_ && offer_) start_pull(memory, gpu);
  if (pull_) return {take_pull(), false};
  seen_bytes_ = arrived_bytes_;
  throw_if_ended();
  return {0, offer_.has_value()};
}

// Nothing where it cannot be, on one of the HCAs: then all goes by the ring.
RdmaChannel::Regions RdmaChannel::register_memory(const iovec& memory, int access, std::optional<int> gpu) const {
  Regions regions;
  for (const auto& lane : lanes_) {
    const RdmaQueuePair& pair = lane->pair();
    regions.push_back(!lane->is_living() ? nullptr
                      : gpu              ? pair.register_device_memory(memory, *gpu, access)
                                         : pair.register_memory(memory, access));
    if (regions.back() || !lane->is_living()) continue;
    static std::atomic<bool> is_told{false};
    static std::atomic<bool> is_told_of_gpu{false};
    if (gpu && !is_told_of_gpu.exchange(true))
      log(LogLevel::warn, std::nullopt,
          "cannot register " + std::to_string(memory.iov_len) + " bytes of GPU " + std::to_string(*gpu) + " with HCA " +
              pair.device().name() + ": " + errno_text(errno) +
              "; such memory goes through host memory. Allocate it with cudaMalloc (not managed or pooled), or leave "
              "HOLMES_RDMA_GPUDIRECT off; this is said once");
    if (!gpu && !is_told.exchange(true))
      log(LogLevel::warn, std::nullopt,
          lane->pair().refused_text(memory.iov_len, errno) +
              "; until then such messages are copied (HOLMES_RDMA_DIRECT_BYTES); this is said once");
    return {};
  }
  return regions;
}

void RdmaChannel::offer(const iovec& piece, std::optional<int> gpu) {
  if (!is_ready()) return;
  const iovec part{piece.iov_base, std::min(piece.iov_len, max_offer_bytes)};
  Offered offered{part, register_memory(part, verbs::access_remote_read, gpu), {}};
  if (offered.regions.empty()) {
    refused_bytes_ = part.iov_len;
    return;
  }
  RdmaOffer& told = rings_.own_offer();
  told = {reinterpret_cast<std::uint64_t>(part.iov_base), part.iov_len, lost_, {}};
  for (const auto& lane : lanes_)
    if (const auto& region = offered.regions[lane->number()]) told.keys[lane->number()] = region->remote_key;
  RdmaLane& lane = main();
  const int error = post_offer();
  if (error == 0) {
    offered_ = std::move(offered);
    ++sent_offers_;
  }
  fail_post(lane, error);
}

// With what is held, where there is room for both.
int RdmaChannel::post_offer() {
  const int error = main().post({.from = &rings_.own_offer(),
                                 .bytes = sizeof(RdmaOffer),
                                 .remote_offset = RdmaRings::offer_offset,
                                 .immediate = immediate(Kind::offer),
                                 .is_solicited = true},
                                posted_to_, held_ ? &*held_ : nullptr);
  if (error == EAGAIN || !std::exchange(held_, std::nullopt)) return error;
  return error == ENOMEM ? EIO : error;  // the stream may lack what was held
}

void RdmaChannel::post_held() {
  const auto held = std::exchange(held_, std::nullopt);
  if (!held) return;
  RdmaLane& lane = main();
  if (const int error = lane.pair().post(*held)) lose(lane, error, "a send is refused: " + errno_text(error));
}

// Nothing where this side's memory is not to be registered: then the answer is 0, and all goes by the ring.
void RdmaChannel::start_pull(const iovec& piece, std::optional<int> gpu) {
  if (direct_bytes_ == SIZE_MAX) return;
  const iovec part{piece.iov_base, std::min<std::size_t>(piece.iov_len, offer_->bytes - pulled_bytes_)};
  Regions regions = register_memory(part, verbs::access_local_write, gpu);
  if (regions.empty()) return;
  constexpr std::size_t page_bytes = 4096;
  const RdmaLane& first = main();
  std::size_t bytes = first.pair().max_read_bytes();
  if (first.has_company) {
    const std::size_t share = part.iov_len / (pieces_of_a_lane * lanes_.size()) / page_bytes * page_bytes;
    bytes = std::min(bytes, std::max(share, least_piece_bytes));
  }
  pull_ = Pull{.memory = part, .regions = std::move(regions), .piece_bytes = bytes};
}

// What to ask for next; nothing where all of it is.
std::optional<RdmaRead> RdmaChannel::next_read() const {
  if (!pull_->again.empty()) return pull_->again.front();
  const std::size_t left = pull_->memory.iov_len - pull_->asked_bytes;
  if (left == 0) return std::nullopt;
  return RdmaRead{.offset = pull_->asked_bytes, .bytes = std::min(left, pull_->piece_bytes)};
}

void RdmaChannel::ask_for_pull() {
  const auto now = clock();
  while (error_ == 0) {
    const auto piece = next_read();
    if (!piece) return;
    RdmaLane* const lane =
        first_to_deliver(lanes_, true, [&](const RdmaLane& one) { return one.arrival_s(piece->bytes); });
    if (!lane) return;
    const bool is_last = piece->offset + piece->bytes == pull_->memory.iov_len;
    const bool is_signaled = is_last || lanes_.size() > 1 || lane->is_signal_due(position_on(*lane));
    const bool answers = is_last && answers_with_last_read();
    std::optional<RdmaQueuePair::Write> then;
    if (answers) {
      rings_.own_read_counts()[0] = lane->asked_bytes() + piece->bytes;
      then = answer_message(offer_->bytes);
    }
    auto* const to = static_cast<std::byte*>(pull_->memory.iov_base) + piece->offset;
    const int error = lane->read(*piece, offer_->address + pulled_bytes_ + piece->offset, offer_->keys[lane->number()],
                                 to, *pull_->regions[lane->number()], is_signaled, position_on(*lane), now, then);
    if (error != 0) {
      lose(*lane, error, "a read is refused: " + errno_text(error));
    } else if (!pull_->again.empty()) {
      pull_->again.pop_front();
    } else {
      pull_->asked_bytes += piece->bytes;
    }
    if (error != 0 || !answers) continue;
    pull_->is_answered = true;
    count_answer(offer_->bytes);
    offer_.reset();  // the next one may come before it is known here that this one is read
  }
}

// The last read of an offer takes the answer along: the HCA sends it once it has read, not this side once it has woken.
// Of several lanes' reads no HCA knows all. And what follows the answer waits for the read too: where this side offers
// something at the time, that would be its next offer.
bool RdmaChannel::answers_with_last_read() const {
  return lanes_.size() == 1 && !offered_ && pulled_bytes_ + pull_->memory.iov_len == offer_->bytes && !has_ended_ &&
         is_ready();
}

void RdmaChannel::take_reads(RdmaLane& lane, std::optional<Clock::time_point> now) {
  if (pull_) pull_->read_bytes += lane.take_read_bytes(now);
}

// With what was read of it; the rest comes by the ring.
void RdmaChannel::answer() {
  offer_.reset();
  owed_answer_ = std::exchange(pulled_bytes_, 0);
  give_answer();
}

// Tells, too, which lane has read how much.
void RdmaChannel::give_answer() {
  if (error_ != 0 || has_ended_ || !is_ready()) return;
  RdmaReadCounts& counts = rings_.own_read_counts();
  for (const auto& lane : lanes_) counts[lane->number()] = lane->read_bytes();
  RdmaLane& lane = main();
  const int error = post(answer_message(*owed_answer_));
  if (error == 0) {
    count_answer(*owed_answer_);
    owed_answer_.reset();
  }
  fail_post(lane, error);
}

RdmaQueuePair::Write RdmaChannel::answer_message(std::size_t bytes) {
  return {.from = &rings_.own_read_counts(),
          .bytes = lanes_.size() * sizeof(std::uint64_t),
          .remote_offset = RdmaRings::counts_offset,
          .immediate = immediate(Kind::answer, bytes),
          .is_solicited = true};
}

void RdmaChannel::count_answer(std::size_t bytes) {
  last_answer_ = bytes;
  ++sent_answers_;
}

void RdmaChannel::let_go() {
  if (!offered_ && !pull_ && !lent_) return;
  for (const auto& lane : lanes_) lane->pair().stop();
  offered_.reset();
  lent_.reset();
  pull_.reset();
  if (error_ == 0) error_ = ECONNABORTED;
}

const std::byte* RdmaChannel::try_peek(std::size_t bytes) {
  if (readable_bytes() < bytes) look_for_receives();
  if (readable_bytes() < bytes && offer_ && !pull_) answer();
  seen_bytes_ = arrived_bytes_;
  if (readable_bytes() >= bytes) return rings_.receive_ring() + (consumed_bytes_ & (rings_.bytes() - 1));
  throw_if_ended();
  return nullptr;
}

void RdmaChannel::consume(std::size_t bytes) {
  consumed_bytes_ += bytes;
  give_credit();
  count_received(bytes);
}

void RdmaChannel::look_for_receives() {
  for (const auto& lane : lanes_) look_for_receives(*lane);
  give_credit();
  if (!is_settled()) catch_up();
}

void RdmaChannel::look_for_receives(RdmaLane& lane) {
  if (lane.is_drained) return;
  std::array<verbs::WorkCompletion, 32> completions;
  std::size_t count = 0;
  do {
    count = lane.pair().poll_receives(completions);
    for (std::size_t i = 0; i < count; ++i) {
      const verbs::WorkCompletion& completion = completions[i];
      if (completion.status != verbs::Status::success) {
        look_for_sends(lane);  // they know the cause
        lose(lane, completion);
        lane.is_drained = true;  // in order: what came is taken up
        return;
      }
      take_up(lane, ntohl(completion.immediate));
    }
    if (count > 0 && error_ == 0 && lane.is_living())
      if (const int error = lane.pair().post_receives(static_cast<std::uint32_t>(count)))
        lose(lane, error, "a receive is refused: " + errno_text(error));
  } while (count == completions.size());
}

// What the peer says.
void RdmaChannel::take_up(RdmaLane& lane, std::uint32_t told) {
  const std::size_t bytes = told & ((1U << kind_shift) - 1);
  bool is_right = true;
  switch (static_cast<Kind>(told >> kind_shift)) {
    case Kind::data:
      arrived_bytes_ += bytes;
      ++lane.arrived_messages;
      RdmaLane::count(lane.received_bytes, bytes);
      is_right = readable_bytes() <= rings_.bytes();
      break;
    case Kind::credit: {
      const RdmaCredit credit = rings_.credit();
      is_right = credit.bytes <= sent_to_ && credit.messages <= lane.sent_messages;
      credit_bytes_ = std::max(credit_bytes_, credit.bytes);
      lane.credited_messages = credit.messages;
      ++credits_;
      break;
    }
    case Kind::offer:
      is_right = !offer_ && !owed_answer_;
      is_offer_new_ = true;
      ++arrived_offers_;
      offer_ = rings_.offer();
      is_right &= offer_->bytes > 0 && offer_->bytes <= max_offer_bytes;
      for (const auto& other : lanes_)
        if ((offer_->lost & other->bit()) != 0) lose(*other, ENETDOWN, "the peer reports it lost");
      break;
    case Kind::answer: {
      is_right = offered_ && !offered_->answer && bytes <= offered_->memory.iov_len;
      ++arrived_answers_;
      const RdmaReadCounts counts = rings_.read_counts();
      for (const auto& one : lanes_) one->peer_read_bytes.store(counts[one->number()], std::memory_order_relaxed);
      if (is_right) offered_->answer = bytes;
      break;
    }
    case Kind::state:
      is_right = take_state(bytes);
      break;
    default:
      has_ended_ = true;
  }
  if (!is_right && !is_shut_down_.load()) throw_senseless();  // then nobody reads any more
}

void RdmaChannel::throw_senseless() const {
  throw ProtocolError("what rank " + std::to_string(peer()) + " writes here over " + main().port() + " makes no sense");
}

void RdmaChannel::look_for_sends() {
  for (const auto& lane : lanes_) look_for_sends(*lane);
  if (owed_answer_ || !is_settled()) catch_up();
}

void RdmaChannel::look_for_sends(RdmaLane& lane) {
  if (!lane.is_living()) return;
  std::array<verbs::WorkCompletion, 32> completions;
  std::size_t count = 0;
  do {
    count = lane.pair().poll_sends(completions);
    for (std::size_t i = 0; i < count; ++i) {
      if (completions[i].status != verbs::Status::success) {
        take_reads(lane, clock());
        return lose(lane, completions[i]);
      }
      if (completions[i].id == end_id) {
        is_end_complete_ = true;
        continue;
      }
      completed_to_ = std::max(completed_to_, lane.complete(completions[i].id));
      is_unanswered_ = false;
    }
  } while (count == completions.size());
  if (lane.is_reading()) take_reads(lane, clock());
}

// What the peer may send again goes with the next message of this side, where there is one before half of a ring is
// taken, or this side waits: a call of the HCA less. (From a quarter on: a credit costs it a receive.)
bool RdmaChannel::is_credit_due(std::size_t part) const {
  return consumed_bytes_ - given_bytes_ >= rings_.bytes() / part ||
         main().arrived_messages - main().given_messages >= RdmaQueuePair::data_depth / part;
}

void RdmaChannel::give_credit() {
  if (is_credit_due(2)) post_credit();
}

// It wakes only who waits for room.
RdmaQueuePair::Write RdmaChannel::credit_message(RdmaCredit& credit) const {
  credit = {consumed_bytes_, main().arrived_messages};
  return {.from = &credit, .bytes = sizeof credit, .immediate = immediate(Kind::credit)};
}

void RdmaChannel::count_credit(const RdmaCredit& credit) {
  given_bytes_ = credit.bytes;
  main().given_messages = credit.messages;
}

void RdmaChannel::post_credit() {
  if (error_ != 0 || has_ended_ || !is_ready()) return;
  RdmaLane& lane = main();
  RdmaCredit credit;
  const RdmaQueuePair::Write write = credit_message(credit);
  int error = post(write);
  if (error == EAGAIN) {
    look_for_sends(lane);
    if (!lane.is_living() || error_ != 0) return;
    error = post(write);
  }
  if (error == 0) count_credit(credit);
  fail_post(lane, error);
}

void RdmaChannel::lose(RdmaLane& lane, const verbs::WorkCompletion& completion) {
  lose(lane, errno_of(completion.status), lane.pair().device().library().status_text(completion.status));
}

// It is stopped here; the peer is told once what has come by it is taken up.
void RdmaChannel::lose(RdmaLane& lane, int error, const std::string& why) {
  if (error_ != 0 || !lane.is_living()) return;
  const bool is_last = std::ranges::count_if(lanes_, [](const auto& one) { return one->is_living(); }) == 1;
  if (is_last || !is_proven_ || has_peer_left()) return fail(error, lane, why);
  const bool is_main = &lane == &main();
  const std::deque<RdmaRead> reads = lane.stop(Clock::now());
  if (pull_) pull_->again.insert(pull_->again.end(), reads.begin(), reads.end());
  lost_ |= lane.bit();
  is_state_due_ = true;
  const auto next = std::ranges::find_if(lanes_, [](const auto& one) { return one->is_living(); });
  if (is_main) {
    copy_lent();
    is_stalled_ = true;
    is_behind_.store(true);
    main_.store((*next)->number());
  }
  if (std::ranges::count_if(lanes_, [](const auto& one) { return one->is_living(); }) == 1)
    (*next)->has_company = false;
  if (is_shut_down_.load() || has_ended_) return;
  std::string others;
  for (const auto& one : lanes_)
    if (one->is_living()) add_word(others, one->port());
  context_->warn_of_loss(peer(), lane.info(), why, others, "what was under way is");
}

// Whether it makes sense. Of two states that come by two lanes in any order the later one says all.
bool RdmaChannel::take_state(std::size_t lost) {
  if (lost + 1 >= lanes_.size()) return false;
  const RdmaState told = rings_.state(lost);
  if (static_cast<std::size_t>(std::popcount(told.lost)) != lost + 1 || told.lost >> lanes_.size() != 0) return false;
  if (std::popcount(told.lost) <= std::popcount(peer_state_.lost)) return true;
  if (told.consumed > told.arrived || told.arrived > sent_to_ || told.arrived < credit_bytes_ ||
      sent_offers_ - told.offers > 1 || sent_answers_ - told.answers > 1)
    return false;
  peer_state_ = told;
  credit_bytes_ = std::max(credit_bytes_, told.consumed);
  ++credits_;
  for (const auto& lane : lanes_)
    if ((told.lost & lane->bit()) != 0) lose(*lane, ENETDOWN, "the peer reports it lost");
  return true;
}

// Sends what is owed, as far as there is room.
void RdmaChannel::catch_up() {
  if (error_ != 0) return;
  if (is_state_due_) tell_state();
  if (is_stalled_) go_on();
  if (!is_stalled_ && is_behind_.load()) send_again();
  if (owed_answer_) give_answer();
}

void RdmaChannel::tell_state() {
  const auto is_through = [](const auto& lane) { return lane->is_living() || lane->is_drained; };
  if (!std::ranges::all_of(lanes_, is_through)) return;
  const auto lost = static_cast<std::size_t>(std::popcount(lost_)) - 1;
  RdmaState& state = rings_.own_state(lost);
  state = {lost_, arrived_bytes_, consumed_bytes_, arrived_offers_, arrived_answers_};
  RdmaLane& lane = main();
  const int error = lane.post({.from = &state,
                               .bytes = sizeof state,
                               .remote_offset = RdmaRings::state_offset(lost),
                               .immediate = immediate(Kind::state, lost),
                               .is_solicited = true},
                              position_on(lane));
  if (error == 0) {
    is_state_due_ = false;
    given_bytes_ = consumed_bytes_;
  }
  fail_post(lane, error);
}

// From where the peer has had it, once it has stopped all lanes that are lost here.
void RdmaChannel::go_on() {
  if ((peer_state_.lost & lost_) != lost_) return;
  posted_to_ = completed_to_ = woken_to_ = peer_state_.arrived;
  main().begin(posted_to_);
  is_offer_due_ = offered_ && sent_offers_ != peer_state_.offers;
  if (sent_answers_ != peer_state_.answers) {
    owed_answer_ = last_answer_;
    --sent_answers_;
  }
  is_stalled_ = false;
}

void RdmaChannel::send_again() {
  RdmaLane& lane = main();
  while (posted_to_ < sent_to_ && lane.has_message()) {
    const std::size_t at = posted_to_ & (rings_.bytes() - 1);
    RdmaQueuePair::Write write =
        next_message(std::min({static_cast<std::size_t>(sent_to_ - posted_to_), message_bytes, rings_.bytes() - at}));
    write.is_solicited = true;
    if (const int error = lane.pair().post(write)) return lose(lane, error, "a send is refused: " + errno_text(error));
  }
  if (posted_to_ < sent_to_) return;
  woken_to_ = sent_to_;
  if (is_offer_due_) {
    const int error = post_offer();
    is_offer_due_ = error != 0;
    fail_post(lane, error);
    if (error != 0) return;
  }
  is_behind_.store(false);
  if (is_shut_down_.load()) post_end();
}

void RdmaChannel::fail(int error, const RdmaLane& lane, const std::string& why) {
  if (error_ != 0) return;
  error_ = error;
  failed_ = &lane;
  if (is_shut_down_.load() || is_closed_by_peer_ || has_ended_) return;
  const ConnectionInfo& info = lane.info();
  log(LogLevel::info, std::nullopt,
      "RDMA to rank " + std::to_string(peer()) + " (host " + info.host + ") over " + info.interface + " " +
          info.local_address + " -> " + info.remote_address + " failed: " + why);
}

void RdmaChannel::throw_if_ended() {
  if (has_ended_ || (is_closed_by_peer_ && error_ == 0)) throw StreamClosed{peer(), 0};
  if (error_ != 0) throw StreamClosed{peer(), is_closed_by_peer_ ? 0 : error_};
}

RdmaChannel::Progress RdmaChannel::progress() const {
  Progress now{arrived_bytes_, 0, credits_};
  for (const auto& lane : lanes_) now.completed += lane->completed();
  return now;
}

// Looks whether there is something to do.
bool RdmaChannel::has_come(bool for_recv, bool for_send) {
  look_for_receives();
  look_for_sends();
  if (std::exchange(waited_, progress()) != progress()) look_at_.reset();
  const bool has_unseen = std::exchange(seen_bytes_, arrived_bytes_) != arrived_bytes_;
  if (error_ != 0 || has_ended_ || is_closed_by_peer_) return true;
  const bool has_pulled = pull_ && (pull_->is_done() || (!pull_->is_asked() && can_ask()));
  const bool may_send = lent_ ? has_gone(*lent_) : offered_ ? offered_->answer.has_value() : sendable_bytes() > 0;
  const bool has_offer = std::exchange(is_offer_new_, false) && !pull_;
  return (for_recv && (has_unseen || has_offer || has_pulled)) || (for_send && may_send);
}

// To be told, which takes a system call, is asked for only where nothing is there.
bool RdmaChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) {
  is_waiting_ = true;
  first_wait_ = fds.size();
  waits_ = 0;
  if (has_come(for_recv, for_send)) return false;
  if (is_credit_due(4)) post_credit();
  using Wake = RdmaQueuePair::Wake;
  const bool awaits_all = !is_settled() || (for_send && !offered_ && !lent_ && sendable_bytes() == 0);
  const bool awaits_sends = pull_ || owed_answer_ || lent_;
  for (const auto& lane : lanes_)
    if (lane->is_living() || !lane->is_drained)
      lane->pair().arm(awaits_all ? Wake::any : awaits_sends ? Wake::sends : Wake::solicited);
  append_waits(fds);
  waits_ = fds.size() - first_wait_;
  if (has_come(for_recv, for_send)) {
    for (const auto& lane : lanes_) lane->pair().take_events();  // or it would end the next wait
    return false;
  }
  // What was armed before a loss is not what is awaited now.
  return awaits_all || is_settled();
}

void RdmaChannel::append_waits(std::vector<pollfd>& fds) const {
  for (const auto& lane : lanes_)
    if (lane->is_living() || !lane->is_drained) fds.push_back({lane->pair().fd(), POLLIN, 0});
  for (const auto& lane : lanes_)
    if (lane->is_living()) fds.push_back({lane->pair().events_fd(), POLLIN, 0});
  for (std::size_t i = 0; i < sockets_.size() && !is_closed_by_peer_; ++i)
    if (!lost_sockets_[i]) fds.push_back({sockets_[i].fd.get(), POLLIN | POLLRDHUP, 0});
}

void RdmaChannel::finish_wait(Clock::time_point now, std::span<const pollfd> asked) {
  is_waiting_ = false;
  bool any = false;
  if (asked.size() < first_wait_ + waits_ || asked.empty()) {  // or they are of another call, which began no wait here
    for (const auto& lane : lanes_) any |= lane->pair().take_events();
    if (!any) has_peer_left();
    return;
  }
  const auto is_ready = [](const pollfd& one) { return one.revents != 0; };
  const auto own = asked.subspan(first_wait_, waits_);
  bool is_quiet = std::ranges::any_of(own, is_ready);
  for (const pollfd& one : own) {
    if (!is_ready(one)) continue;
    for (const auto& lane : lanes_) {
      if (one.fd == lane->pair().fd()) lane->pair().take_events();
      if (one.fd == lane->pair().events_fd()) is_quiet = false;
    }
    for (const Connection& socket : sockets_) any |= one.fd == socket.fd.get();
  }
  if (any) has_peer_left();
  for (const auto& lane : lanes_)
    if (is_quiet && lane->is_living()) lane->pair().device().events().looked(now);
}

// Whether its side of the TCP connections has ended; what it sent before is here by then. One of several that fails has
// lost its NIC.
bool RdmaChannel::has_peer_left() {
  for (const auto& socket : sockets_) {
    const std::size_t number = static_cast<std::size_t>(&socket - sockets_.data());
    if (is_closed_by_peer_ || lost_sockets_[number]) continue;
    char byte = 0;
    const ssize_t got = ::recv(socket.fd.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) continue;
    lost_sockets_[number] = true;
    is_closed_by_peer_ = got == 0 || errno == ECONNRESET || std::ranges::count(lost_sockets_, false) == 0;
  }
  return is_closed_by_peer_;
}

std::optional<Clock::time_point> RdmaChannel::next_maintenance(Clock::time_point now) {
  // With several lanes also where no operation waits: the peer may, for what a lost one had.
  if (!is_waiting_ && (lanes_.size() == 1 || error_ != 0 || has_ended_)) return std::nullopt;
  if (!look_at_) look_at_ = now + port_look_interval;
  auto next = *look_at_;
  for (const auto& lane : lanes_)
    if (lane->is_living()) next = std::min(next, lane->pair().next_trouble().value_or(next));
  return next;
}

void RdmaChannel::maintain(Clock::time_point now) {
  if (error_ != 0) return;
  look_for_trouble(now);
  if (!look_at_ || now < *look_at_ || error_ != 0) return;
  if (lanes_.size() > 1) look_for_receives();
  look_for_sends();
  if (now >= look_at_ports_at_) look_at_ports(now);
  look_at_ = now + (is_settled() ? Clock::duration(port_look_interval) : Clock::duration(catch_up_interval));
}

void RdmaChannel::look_for_trouble(Clock::time_point now) {
  for (const auto& lane : lanes_) {
    if (!lane->is_living() || error_ != 0) continue;
    if (const auto trouble = lane->pair().look_for_trouble(now)) lose(*lane, trouble->error, trouble->why);
  }
}

void RdmaChannel::look_at_ports(Clock::time_point now) {
  look_at_ports_at_ = now + port_look_interval;
  is_unanswered_ = std::ranges::all_of(lanes_, [](const auto& lane) { return lane->asked || !lane->is_living(); });
  for (const auto& lane : lanes_) {
    if (!lane->is_living()) {
      if (!lane->is_drained && now - lane->stopped_at() > longest_drain)
        return fail(EIO, *lane, "the HCA does not end what is under way");
      continue;
    }
    lane->inactive_looks = lane->pair().device().is_active() ? 0 : lane->inactive_looks + 1;
    if (lane->inactive_looks >= inactive_looks) lose(*lane, ENETDOWN, "the port is not active any more");
    if (lane->asked || !lane->is_living() || error_ != 0) continue;
    lane->asked = lane->posted();
    const int error = lane->post({.is_signaled = true}, position_on(*lane));
    if (error != 0) lane->asked.reset();
    fail_post(*lane, error);
  }
}

void RdmaChannel::shutdown() {
  if (is_shut_down_.exchange(true)) return;
  shut_down_at_.store(Clock::now());
  if (offered_ || pull_ || lent_) return let_go();
  post_end();
}

// What is behind is told before it: then who sends that again does it.
void RdmaChannel::post_end() {
  RdmaLane& lane = *lanes_[main_.load()];
  if (is_behind_.load()) return;
  lane.pair().post({.immediate = immediate(Kind::end), .is_signaled = true, .is_solicited = true, .id = end_id});
}

void RdmaChannel::linger() {
  const auto end = shut_down_at_.load() + longest_linger;
  while (!is_end_complete_ && error_ == 0 && !has_ended_ && Clock::now() < end) {
    for (const auto& lane : lanes_) lane->pair().arm(RdmaQueuePair::Wake::any);
    look_for_trouble(Clock::now());
    look_for_sends();
    look_for_receives();
    if (is_end_complete_ || error_ != 0 || has_ended_ || has_peer_left()) return;
    std::vector<pollfd> fds;
    append_waits(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(linger_look.count()));
    for (const auto& lane : lanes_) lane->pair().take_events();
  }
}

void RdmaChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  for (const auto& lane : lanes_) lane->append_info(infos);
}

std::vector<int> RdmaChannel::descriptors() const {
  std::vector<int> fds;
  for (const Connection& socket : sockets_) fds.push_back(socket.fd.get());
  for (const auto& lane : lanes_) {
    const verbs::Context& context = *lane->pair().device().context();
    fds.insert(fds.end(), {lane->pair().fd(), context.command_fd, context.async_fd});
  }
  return fds;
}

}  // namespace holmes
