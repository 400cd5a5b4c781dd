#include "holmes/transport/rdma/rdma_channel.hpp"

#include <arpa/inet.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {
namespace {

// Bytes of a message, but for a last one that is half of it longer. Of a send the HCA is given the first one by itself,
// to send it while this side copies the others.
constexpr std::size_t message_bytes = 128 * 1024;
// Bytes after which a peer that sleeps is woken though more follow: it copies these while the others come. (Those of a
// call wake it with the last, so that it is not woken for each message.)
constexpr std::size_t wake_bytes = 1024 * 1024;
// Of the requests in a row one is signaled at least; what it tells frees those before it.
constexpr std::uint64_t signal_every = 16;
// Of an offer at most: what each side locks for a peer beside its rings.
constexpr std::size_t max_offer_bytes = 8 * 1024 * 1024;
// While it waits, how often it asks whether the path lives: a link that is cut tells only those who send.
constexpr auto port_look_interval = std::chrono::seconds(1);
constexpr int inactive_looks = 2;  // a port may flap
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

RdmaChannel::RdmaChannel(int peer, std::unique_ptr<RdmaQueuePair> pair, Connection socket)
    : Channel(peer),
      pair_(std::move(pair)),
      socket_(std::move(socket)),
      epoch_(fork_epoch()),
      ends_(RdmaQueuePair::send_depth),
      direct_bytes_(pair_->device().library().survives_fork() ? pair_->device().settings().rdma_direct_bytes
                                                              : SIZE_MAX) {
  socket_.info.transport = "rdma";
  socket_.info.interface = pair_->device().name();
  socket_.info.local_address = pair_->endpoint().text();
  socket_.info.remote_address = pair_->peer().text();
  socket_.info.device_bound = true;
}

RdmaChannel::~RdmaChannel() {
  if (epoch_ != fork_epoch()) return;  // all of it is the parent's
  let_go();
  if (is_shut_down_.load()) where_memory_allows([this] { linger(); });
}

void RdmaChannel::start_proof() {
  asked_ = posted_;
  if (const int error = post({.is_signaled = true})) fail(error, errno_text(error));
}

bool RdmaChannel::is_proven() {
  pair_->take_events();
  pair_->arm(RdmaQueuePair::Wake::any);
  look_for_sends();
  if (error_ != 0) {
    const ConnectionInfo& info = socket_.info;
    throw UnreachableError("rank " + std::to_string(peer()) + " (host " + info.host +
                               ") does not answer over RDMA: " + info.interface + " " + info.local_address + " -> " +
                               info.remote_address + ": " + errno_text(error_) +
                               "; check that the two ports are of one fabric, that their GIDs, MTUs, P_Keys and VLANs "
                               "fit (HOLMES_RDMA_...), and that the switches let RoCE pass; or use transport tcp",
                           {.peer = peer(), .host = info.host, .nic = info.interface, .system_errno = error_});
  }
  return !asked_;
}

// Posts a request that is counted; returns an errno. Where there is no room for it: EAGAIN.
int RdmaChannel::post(RdmaQueuePair::Write write) {
  if (posted_ - completed_ >= RdmaQueuePair::send_depth - 2) return EAGAIN;  // one is kept for the end
  write.is_signaled |= is_signal_due();
  write.id = posted_ + 1;
  if (const int error = pair_->post(write)) return error;
  count_request(write.is_signaled);
  return 0;
}

bool RdmaChannel::is_signal_due() const {
  return posted_ + 1 - signaled_to_ >= signal_every || sent_to_ - unsignaled_from_ >= pair_->ring_bytes() / 4;
}

void RdmaChannel::count_request(bool is_signaled) {
  ends_[posted_++ % ends_.size()] = sent_to_;
  if (is_signaled) signaled_to_ = posted_, unsignaled_from_ = sent_to_;
}

// What was not posted can be later, or the path is lost.
void RdmaChannel::fail_post(int error) {
  if (error != 0 && error != EAGAIN && error != ENOMEM) fail(error, "a send is refused: " + errno_text(error));
}

std::size_t RdmaChannel::sendable_bytes(std::uint64_t more) const {
  const bool has_message = data_messages_ + more - credit_.messages < RdmaQueuePair::data_depth;
  const bool has_requests = posted_ + more - completed_ < RdmaQueuePair::data_send_depth;
  if (!has_message || !has_requests) return 0;
  return pair_->ring_bytes() - (sent_to_ - std::min(credit_.bytes, completed_to_));
}

std::size_t RdmaChannel::try_send(std::span<const iovec> pieces) { return send(pieces, false); }

std::size_t RdmaChannel::send(std::span<const iovec> pieces, bool is_followed) {
  std::size_t wanted = 0;
  for (const iovec& piece : pieces) wanted += piece.iov_len;
  wanted = std::min(wanted, pair_->ring_bytes());
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
  std::array<RdmaQueuePair::Write, RdmaQueuePair::most_at_once> writes;
  const std::size_t at_once = skip == 0 ? 1 : writes.size();
  std::size_t count = 0;
  std::size_t sent = 0;
  for (; count < at_once && sent < most; ++count) {
    RdmaQueuePair::Write& write = writes[count];
    write = fill_message(pieces, skip + sent, most - sent, is_followed);
    if (write.bytes == 0) break;
    sent += write.bytes;
  }
  if (count == 0) return 0;
  if (const int error = pair_->post_all({writes.data(), count})) {  // there was room for all of them
    fail(error, "a send is refused: " + errno_text(error));
    throw_if_ended();
  }
  return sent;
}

// One message, which counts as posted; of no bytes where there is no room.
RdmaQueuePair::Write RdmaChannel::fill_message(std::span<const iovec> pieces, std::size_t skip, std::size_t most,
                                               bool is_followed) {
  const std::size_t at = sent_to_ & (pair_->ring_bytes() - 1);
  const std::size_t goal = most <= message_bytes + message_bytes / 2 ? most : message_bytes;
  const std::size_t room = std::min({sendable_bytes(), goal, pair_->ring_bytes() - at});
  std::size_t filled = 0;
  for (const iovec& piece : pieces) {
    if (filled == room) break;
    const std::size_t skipped = std::min(skip, piece.iov_len);
    skip -= skipped;
    const std::size_t bytes = std::min(piece.iov_len - skipped, room - filled);
    if (bytes > 0)
      std::memcpy(pair_->send_ring() + at + filled, static_cast<const std::byte*>(piece.iov_base) + skipped, bytes);
    filled += bytes;
  }
  if (filled == 0) return {};
  sent_to_ += filled;
  // Without it only where another one follows for sure: a credit may be sent in between.
  const bool wakes = (filled == most && !is_followed) || sent_to_ - woken_to_ >= wake_bytes || sendable_bytes(2) == 0;
  const bool is_signaled = is_signal_due();
  count_request(is_signaled);
  ++data_messages_;
  if (wakes) woken_to_ = sent_to_;
  return {.from = pair_->send_ring() + at,
          .bytes = filled,
          .remote_offset = pair_->ring_offset() + at,
          .immediate = immediate(Kind::data, filled),
          .is_signaled = is_signaled,
          .is_solicited = wakes,
          .id = posted_};
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
    if (bytes > 0)
      std::memcpy(piece.iov_base, pair_->receive_ring() + (consumed_bytes_ & (pair_->ring_bytes() - 1)), bytes);
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
  if (!offered_) {
    if (refused_bytes_ > 0 || pieces.back().iov_len < direct_bytes_) return try_send(pieces);
    const auto before = pieces.first(pieces.size() - 1);
    std::size_t left = 0;
    for (const iovec& piece : before) left += piece.iov_len;
    const std::size_t sent = left > 0 ? send(before, true) : 0;
    if (sent < left) return sent;  // the ring is full, which has woken the peer
    offer(pieces.back());
    return offered_ ? sent : sent + try_send(pieces.last(1));
  }
  if (!offered_->answer) look_for_receives();
  if (!offered_->answer) {
    throw_if_ended();
    return 0;
  }
  const std::size_t taken = *offered_->answer;
  refused_bytes_ = offered_->memory.iov_len - taken;
  offered_.reset();
  if (taken == 0) return try_send(pieces);
  count_sent(taken);
  return taken;
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
  look_for_sends();
  ask_for_pull();
  if (!pull_->is_done) {
    throw_if_ended();
    return 0;
  }
  const std::size_t received = pull_->memory.iov_len;
  pull_.reset();
  pulled_bytes_ += received;
  if (pulled_bytes_ == offer_->bytes) answer();
  count_received(received);
  return received;
}

// Nothing where it cannot be: then all goes by the ring.
SharedRegion RdmaChannel::register_memory(const iovec& memory, int access) const {
  auto region = pair_->register_memory(memory, access);
  static std::atomic<bool> is_told{false};
  if (!region && !is_told.exchange(true))
    log(LogLevel::warn, std::nullopt,
        pair_->refused_text(memory.iov_len, errno) +
            "; until then such messages are copied (HOLMES_RDMA_DIRECT_BYTES); this is said once");
  return region;
}

void RdmaChannel::offer(const iovec& piece) {
  const iovec part{piece.iov_base, std::min(piece.iov_len, max_offer_bytes)};
  Offered offered{part, register_memory(part, verbs::access_remote_read), {}};
  if (!offered.region) {
    refused_bytes_ = part.iov_len;
    return;
  }
  pair_->own_offer() = {reinterpret_cast<std::uint64_t>(part.iov_base), part.iov_len, offered.region->remote_key};
  const int error = post({.from = &pair_->own_offer(),
                          .bytes = sizeof(RdmaOffer),
                          .remote_offset = RdmaQueuePair::offer_offset,
                          .immediate = immediate(Kind::offer),
                          .is_solicited = true});
  if (error == 0) offered_ = std::move(offered);
  fail_post(error);
}

// Nothing where this side's memory is not to be registered: then the answer is 0, and all goes by the ring.
void RdmaChannel::start_pull(const iovec& piece) {
  if (direct_bytes_ == SIZE_MAX) return;
  const iovec part{piece.iov_base, std::min<std::size_t>(piece.iov_len, offer_->bytes - pulled_bytes_)};
  auto region = register_memory(part, verbs::access_local_write);
  if (region) pull_ = Pull{part, std::move(region)};
}

void RdmaChannel::ask_for_pull() {
  while (error_ == 0 && !pull_->is_asked() && has_request()) {
    const std::size_t bytes = std::min(pull_->memory.iov_len - pull_->asked_bytes, pair_->max_read_bytes());
    const bool is_last = pull_->asked_bytes + bytes == pull_->memory.iov_len;
    const bool is_signaled = is_last || is_signal_due();
    auto* const to = static_cast<std::byte*>(pull_->memory.iov_base) + pull_->asked_bytes;
    const int error = pair_->post_read(*offer_, pulled_bytes_ + pull_->asked_bytes, to, bytes, *pull_->region,
                                       is_signaled ? posted_ + 1 : 0);
    if (error != 0) return fail(error, "a read is refused: " + errno_text(error));
    count_request(is_signaled);
    pull_->asked_bytes += bytes;
    pull_->last_id = posted_;
  }
}

// With what was read of it; the rest comes by the ring.
void RdmaChannel::answer() {
  offer_.reset();
  owed_answer_ = std::exchange(pulled_bytes_, 0);
  give_answer();
}

void RdmaChannel::give_answer() {
  if (error_ != 0 || has_ended_) return;
  const int error = post({.immediate = immediate(Kind::answer, *owed_answer_), .is_solicited = true});
  if (error == 0) owed_answer_.reset();
  fail_post(error);
}

void RdmaChannel::let_go() {
  if (!offered_ && !pull_) return;
  pair_->stop();
  offered_.reset();
  pull_.reset();
  if (error_ == 0) error_ = ECONNABORTED;
}

const std::byte* RdmaChannel::try_peek(std::size_t bytes) {
  if (readable_bytes() < bytes) look_for_receives();
  if (readable_bytes() < bytes && offer_ && !pull_) answer();
  seen_bytes_ = arrived_bytes_;
  if (readable_bytes() >= bytes) return pair_->receive_ring() + (consumed_bytes_ & (pair_->ring_bytes() - 1));
  throw_if_ended();
  return nullptr;
}

void RdmaChannel::consume(std::size_t bytes) {
  consumed_bytes_ += bytes;
  give_credit();
  count_received(bytes);
}

void RdmaChannel::look_for_receives() {
  std::array<verbs::WorkCompletion, 32> completions;
  std::size_t count = 0;
  do {
    count = pair_->poll_receives(completions);
    for (std::size_t i = 0; i < count; ++i) {
      const verbs::WorkCompletion& completion = completions[i];
      if (completion.status != verbs::Status::success) {
        look_for_sends();  // they know the cause
        return fail(completion);
      }
      take_up(ntohl(completion.immediate));
    }
    if (count > 0 && error_ == 0)
      if (const int error = pair_->post_receives(static_cast<std::uint32_t>(count)))
        fail(error, "a receive is refused: " + errno_text(error));
  } while (count == completions.size());
  if (arrived_messages_ - given_.messages >= RdmaQueuePair::data_depth / 4) give_credit();
}

// What the peer says.
void RdmaChannel::take_up(std::uint32_t told) {
  const std::size_t bytes = told & ((1U << kind_shift) - 1);
  bool is_right = true;
  switch (static_cast<Kind>(told >> kind_shift)) {
    case Kind::data:
      arrived_bytes_ += bytes;
      ++arrived_messages_;
      is_right = readable_bytes() <= pair_->ring_bytes();
      break;
    case Kind::credit:
      credit_ = pair_->credit();
      is_right = credit_.bytes <= sent_to_ && credit_.messages <= data_messages_;
      break;
    case Kind::offer:
      is_right = !offer_ && !owed_answer_;
      is_offer_new_ = true;
      offer_ = pair_->offer();
      is_right &= offer_->bytes > 0 && offer_->bytes <= max_offer_bytes;
      break;
    case Kind::answer:
      is_right = offered_ && !offered_->answer && bytes <= offered_->memory.iov_len;
      if (is_right) offered_->answer = bytes;
      break;
    default:
      has_ended_ = true;
  }
  if (is_right || is_shut_down_.load()) return;  // then nobody reads any more
  throw ProtocolError("what rank " + std::to_string(peer()) + " writes here over " + socket_.info.interface +
                      " makes no sense");
}

void RdmaChannel::look_for_sends() {
  std::array<verbs::WorkCompletion, 32> completions;
  std::size_t count = 0;
  do {
    count = pair_->poll_sends(completions);
    for (std::size_t i = 0; i < count; ++i) {
      if (completions[i].status != verbs::Status::success) return fail(completions[i]);
      if (completions[i].id == end_id) {
        is_end_complete_ = true;
        continue;
      }
      completed_ = completions[i].id;
      completed_to_ = ends_[(completed_ - 1) % ends_.size()];
      is_unanswered_ = false;
      if (pull_ && pull_->is_asked() && completed_ >= pull_->last_id) pull_->is_done = true;
      if (asked_ && *asked_ < completed_) asked_.reset();
    }
  } while (count == completions.size());
  if (owed_answer_) give_answer();
}

// Tells the peer what it may send again, in steps of a quarter: a sender never runs dry for it. It wakes only who waits
// for room.
void RdmaChannel::give_credit() {
  if (consumed_bytes_ - given_.bytes < pair_->ring_bytes() / 4 &&
      arrived_messages_ - given_.messages < RdmaQueuePair::data_depth / 4)
    return;
  if (error_ != 0 || has_ended_) return;
  const RdmaCredit credit{consumed_bytes_, arrived_messages_};
  int error = post({.from = &credit, .bytes = sizeof credit, .immediate = immediate(Kind::credit)});
  if (error == EAGAIN) {
    look_for_sends();
    error = post({.from = &credit, .bytes = sizeof credit, .immediate = immediate(Kind::credit)});
  }
  if (error == 0) given_ = credit;
  fail_post(error);
}

void RdmaChannel::fail(const verbs::WorkCompletion& completion) {
  fail(errno_of(completion.status), pair_->device().library().status_text(completion.status));
}

void RdmaChannel::fail(int error, const std::string& why) {
  if (error_ != 0) return;
  error_ = error;
  if (is_shut_down_.load() || is_closed_by_peer_ || has_ended_) return;
  log(LogLevel::info, std::nullopt,
      "RDMA to rank " + std::to_string(peer()) + " (host " + socket_.info.host + ") over " + socket_.info.interface +
          " " + socket_.info.local_address + " -> " + socket_.info.remote_address + " failed: " + why);
}

void RdmaChannel::throw_if_ended() {
  if (has_ended_ || (is_closed_by_peer_ && error_ == 0)) throw StreamClosed{peer(), 0};
  if (error_ != 0) throw StreamClosed{peer(), is_closed_by_peer_ ? 0 : error_};
}

bool RdmaChannel::prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) {
  is_waiting_ = true;
  const bool is_full = for_send && !offered_ && sendable_bytes() == 0;
  const bool awaits_sends = pull_ || owed_answer_;
  using Wake = RdmaQueuePair::Wake;
  pair_->arm(is_full ? Wake::any : awaits_sends ? Wake::sends : Wake::solicited);
  look_for_receives();
  look_for_sends();
  if (std::exchange(waited_, progress()) != progress()) look_at_.reset();
  const bool has_unseen = std::exchange(seen_bytes_, arrived_bytes_) != arrived_bytes_;
  fds.push_back({pair_->fd(), POLLIN, 0});
  if (!is_closed_by_peer_) fds.push_back({socket_.fd.get(), POLLIN | POLLRDHUP, 0});
  if (error_ != 0 || has_ended_ || is_closed_by_peer_) return false;
  const bool has_pulled = pull_ && (pull_->is_done || (!pull_->is_asked() && has_request()));
  const bool may_send = offered_ ? offered_->answer.has_value() : sendable_bytes() > 0;
  const bool has_offer = std::exchange(is_offer_new_, false) && !pull_;
  return !(for_recv && (has_unseen || has_offer || has_pulled)) && !(for_send && may_send);
}

void RdmaChannel::finish_wait() {
  is_waiting_ = false;
  if (!pair_->take_events()) has_peer_left();
}

// Whether its side of the TCP connection has ended; what it sent before is here by then.
bool RdmaChannel::has_peer_left() {
  char byte = 0;
  const ssize_t got = ::recv(socket_.fd.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  is_closed_by_peer_ |= got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  return is_closed_by_peer_;
}

std::optional<Clock::time_point> RdmaChannel::next_maintenance(Clock::time_point now) {
  if (!is_waiting_) return std::nullopt;
  if (!look_at_) look_at_ = now + port_look_interval;
  return look_at_;
}

void RdmaChannel::maintain(Clock::time_point now) {
  if (!look_at_ || now < *look_at_ || error_ != 0) return;
  look_at_ = now + port_look_interval;
  look_for_sends();
  is_unanswered_ = asked_.has_value();
  inactive_looks_ = pair_->device().is_active() ? 0 : inactive_looks_ + 1;
  if (inactive_looks_ >= inactive_looks) return fail(ENETDOWN, "the port is not active any more");
  if (asked_) return;
  asked_ = posted_;
  const int error = post({.is_signaled = true});
  if (error != 0) asked_.reset();
  fail_post(error);
}

void RdmaChannel::shutdown() {
  if (is_shut_down_.exchange(true)) return;
  shut_down_at_.store(Clock::now());
  if (offered_ || pull_) return let_go();
  pair_->post({.immediate = immediate(Kind::end), .is_signaled = true, .is_solicited = true, .id = end_id});
}

void RdmaChannel::linger() {
  const auto end = shut_down_at_.load() + longest_linger;
  while (!is_end_complete_ && error_ == 0 && !has_ended_ && Clock::now() < end) {
    pair_->arm(RdmaQueuePair::Wake::any);
    look_for_sends();
    look_for_receives();
    if (is_end_complete_ || error_ != 0 || has_ended_ || has_peer_left()) return;
    pollfd fds[] = {{pair_->fd(), POLLIN, 0}, {socket_.fd.get(), POLLIN | POLLRDHUP, 0}};
    ::poll(fds, 2, static_cast<int>(linger_look.count()));
    pair_->take_events();
  }
}

void RdmaChannel::append_info(std::vector<ConnectionInfo>& infos) const {
  infos.push_back(socket_.info);
  infos.back().sent_bytes = sent_bytes();
  infos.back().received_bytes = received_bytes();
}

std::vector<int> RdmaChannel::descriptors() const {
  const verbs::Context& context = *pair_->device().context();
  return {socket_.fd.get(), pair_->fd(), context.command_fd, context.async_fd};
}

}  // namespace holmes
