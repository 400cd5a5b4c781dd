#include "holmes/transport/rail.hpp"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {
namespace {

// Of the newest window. Measured rates of 10 ms windows on a shaped link differ by a tenth.
constexpr double newest_weight = 0.4;
constexpr double least_rail_bytes_per_s = 1000;
constexpr double burst_trust = 0.5;

}  // namespace

void RailRate::observe(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy) {
  if (!start_) return;
  const double elapsed_s = std::chrono::duration<double>(now - *start_).count();
  const double bytes = static_cast<double>(acknowledged_bytes - start_bytes_);
  if (!is_busy) {
    // A short run may be a burst that a token bucket or a queue let pass. And a rail that is fast enough for what it
    // was given stays unknown: this bound may be far too low.
    const double trust = now - *start_ >= first_window ? 1 : burst_trust;
    const double at_least = elapsed_s > 0 ? trust * bytes / elapsed_s : 0;
    if (rate_ && from_idle_ && bytes >= telling_bytes && at_least > *rate_) rate_ = at_least;
    start_.reset();
    return;
  }
  if (!is_due(now)) return;
  if (!rate_ && bytes < telling_bytes && now - *start_ < std::max<Clock::duration>(longest_first_window, 2 * window_))
    return;
  const double measured = std::max(bytes / elapsed_s, least_rail_bytes_per_s);
  rate_ = rate_ ? *rate_ + newest_weight * (measured - *rate_) : measured;
  disregard(now, acknowledged_bytes, is_busy);
}

void RailRate::disregard(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy) {
  start_.reset();
  if (!is_busy) return;
  start_ = now;
  start_bytes_ = acknowledged_bytes;
  from_idle_ = false;
}

void ConnectionBound::observe(Clock::time_point now, const ConnectionLook& look) {
  looked_at_ = now;
  full_looks_ = look.is_held_by_buffer() && !look.has_queue() ? full_looks_ + 1 : 0;
}

std::optional<std::uint64_t> BbrStart::observe(const BbrLook& look, bool is_held_up) {
  constexpr double growth = 1.25;
  if (is_held_) {
    if (look.is_starting && ++looks_ < longest_held_looks) return std::nullopt;
    is_held_ = false;
    most_bytes_per_s_ = 0;
    return no_limit;
  }
  if (!look.is_starting || !is_held_up || look.bytes_per_s == 0) return std::nullopt;
  if (static_cast<double>(look.bytes_per_s) > growth * static_cast<double>(most_bytes_per_s_)) {
    most_bytes_per_s_ = look.bytes_per_s;
    looks_ = 0;
  }
  if (++looks_ < telling_looks) return std::nullopt;
  is_held_ = true;
  looks_ = 0;
  return look.bytes_per_s;
}

namespace {

// What may be under way on a rail, in time: long enough to outlast a pause of the sending thread and the queue in which
// acknowledgements wait, short enough to cost little at an operation's end (measured: 6 and 10 ms lose up to 9 and 4 %
// of two equal rails, 15 ms 2 % of unequal ones).
constexpr double queue_s = 0.012;
constexpr double chunk_s = 0.0005;
// Of a round trip at least: on far rails `window_chunks` shorter ones would be less than what is under way.
constexpr double chunk_round_trips = 1.0 / 8;
// Of a far rail's congestion window at least: its rate is known round trips after the window has grown, and until then
// `window_chunks` by the rate are less than what is under way.
constexpr double chunk_windows = 1.0 / 4;
constexpr std::size_t least_limit_bytes = 128 * 1024;
constexpr std::size_t most_limit_bytes = 2 * 1024 * 1024;  // beyond what the round trip needs; stays in the cache
constexpr std::size_t most_far_limit_bytes = std::size_t{1} << 30;  // none of its own
constexpr std::size_t least_chunk_bytes = 16 * 1024;
// Refill when a quarter has left: fewer wake-ups.
constexpr double refill_below = 0.75;
// The system repeats a segment after 0.2 s, 0.6 s, 1.4 s, ...; one repetition alone may be a congested link.
constexpr int repetitions_of_a_loss = 2;

void add(std::atomic<std::uint64_t>& counter, std::size_t bytes) {
  counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

}  // namespace

Rail::Rail(Connection socket, int index)
    : socket_(std::move(socket)),
      index_(index),
      unknown_limit_bytes_(least_limit_bytes),
      heeds_loss_(holmes::heeds_loss(congestion_control_of(fd()))) {
  if (const auto round_trip = shortest_round_trip(fd())) set_round_trip(*round_trip);
}

void Rail::limit_unsent(std::size_t most_far_bytes) {
  const int most_bytes = static_cast<int>(is_far() ? std::min(most_far_bytes, max_chunk_bytes) : max_chunk_bytes);
  set_option(fd(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, most_bytes);
}

void Rail::look_anew() {
  bound_ = {};
  if (socket_.watch) socket_.watch->forget();
}

void Rail::set_round_trip(std::chrono::microseconds shortest) {
  min_rtt_s_ = std::chrono::duration<double>(shortest).count();
  rate_.set_round_trip(shortest);
}

void Rail::push(Chunk chunk, Clock::time_point now) {
  if (queue_.empty()) {
    rate_.start(now, acknowledged_bytes_);
    progress_at_ = now;
  }
  pushed_at_ = now;
  chunk.frame->header.crc = chunk.frame->header.right_crc();
  pushed_bytes_ += chunk.frame->wire_bytes();
  queue_.push_back(std::move(chunk));
  flush();
}

void Rail::flush() {
  while (has_unwritten() && is_living()) {
    const Frame& frame = *queue_[written_chunks_].frame;
    iovec piece{const_cast<std::byte*>(frame.wire()) + partial_bytes_, frame.wire_bytes() - partial_bytes_};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const ssize_t sent = socket_.send(message);
    if (sent < 0) {
      if (!would_block(errno)) break_off(errno);
      return;
    }
    written_bytes_ += static_cast<std::size_t>(sent);
    partial_bytes_ += static_cast<std::size_t>(sent);
    add(sent_bytes_, static_cast<std::size_t>(sent));
    if (partial_bytes_ < frame.wire_bytes()) return;
    partial_bytes_ = 0;
    ++written_chunks_;
  }
}

std::optional<std::uint64_t> Rail::first_unwritten() const {
  std::optional<std::uint64_t> first;
  for (std::size_t i = written_chunks_; i < queue_.size(); ++i) {
    if (queue_[i].frame->header.kind != FrameKind::data || queue_[i].is_copied) continue;
    if (!first || queue_[i].begin_bytes < *first) first = queue_[i].begin_bytes;
  }
  return first;
}

std::optional<std::uint64_t> Rail::oldest_sequence() const {
  std::optional<std::uint64_t> oldest;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const FrameHeader& header = queue_[i].frame->header;
    if (header.kind == FrameKind::data && !queue_[i].is_copied && (!oldest || header.sequence < *oldest))
      oldest = header.sequence;
  }
  return oldest;
}

std::optional<Clock::time_point> Rail::next_look() const {
  return socket_.pacer ? socket_.pacer->next_look(has_unwritten()) : std::nullopt;
}

void Rail::collect(Clock::time_point now, FramePool& pool) {
  if (next_look()) socket_.pacer->look(now);
  if (socket_.watch) socket_.watch->look(now);
  look_at_limit(now);
  if (queue_.empty()) return;
  // Encrypted, there are a few more of them than of the bytes that are counted here: the sum errs on the safe side.
  int queued_bytes = 0;
  if (::ioctl(fd(), SIOCOUTQ, &queued_bytes) != 0) return;
  const std::uint64_t acknowledged =
      std::max(written_bytes_ - std::min<std::uint64_t>(written_bytes_, static_cast<unsigned>(queued_bytes)),
               acknowledged_bytes_);
  if (acknowledged != acknowledged_bytes_) progress_at_ = acknowledged_at_ = now;
  acknowledged_bytes_ = acknowledged;
  while (written_chunks_ > 0 && released_bytes_ + queue_[0].frame->wire_bytes() <= acknowledged) {
    Chunk chunk = queue_.pop_front();
    --written_chunks_;
    released_bytes_ += chunk.frame->wire_bytes();
    pool.give(std::move(chunk.frame));
  }
  const bool is_busy = outstanding_bytes() >= least_chunk_bytes;
  if (!is_busy && outstanding_bytes() > 0) return;  // soon done, or the acknowledgement is delayed
  if (!is_busy && !rate_.bytes_per_s()) unknown_limit_bytes_ = std::min(unknown_limit_bytes_ * 2, most_limit_bytes);
  if (is_busy && !rate_.is_due(now)) return;
  const tcp_info info = tcp_info_of(fd()).value_or(tcp_info{});
  if (info.tcpi_min_rtt != ~0U) set_round_trip(std::chrono::microseconds(info.tcpi_min_rtt));
  const bool was_receiver_limited = info.tcpi_rwnd_limited != receiver_limited_us_;
  receiver_limited_us_ = info.tcpi_rwnd_limited;
  if (was_receiver_limited) {
    rate_.disregard(now, acknowledged_bytes_, is_busy);
  } else {
    rate_.observe(now, acknowledged_bytes_, is_busy);
  }
}

void Rail::look_at_limit(Clock::time_point now) {
  const auto round_trip = std::chrono::duration<double>(min_rtt_s_);
  if (!is_far() || outstanding_bytes() == 0 || !is_living() ||
      !bound_.is_due(now, std::chrono::duration_cast<Clock::duration>(round_trip)))
    return;
  const auto info = tcp_info_of(fd());
  if (!info) return;
  window_bytes_ = std::size_t{info->tcpi_snd_cwnd} * info->tcpi_snd_mss;
  const ConnectionLook look{.is_full = has_unwritten() && is_buffer_full(fd()),
                            .unsent_bytes = info->tcpi_notsent_bytes,
                            .under_way_bytes = std::size_t{info->tcpi_unacked} * info->tcpi_snd_mss,
                            .round_trip = std::chrono::microseconds(info->tcpi_rtt),
                            .shortest = std::chrono::microseconds(info->tcpi_min_rtt)};
  bound_.observe(now, look);
  if (heeds_loss_ || socket_.pacer) return;
  const auto bbr = bbr_of(fd());
  const auto rate = bbr ? start_.observe(*bbr, look.is_held_by_buffer() && look.has_queue()) : std::nullopt;
  if (rate) set_option(fd(), SOL_SOCKET, SO_MAX_PACING_RATE, *rate);
}

bool Rail::is_far() const { return min_rtt_s_ >= std::chrono::duration<double>(far_round_trip).count(); }

std::size_t Rail::limit_bytes() const {
  // TCP knows it better than what was acknowledged tells once in a round trip: one that waits for a lost packet still
  // takes more.
  if (is_far()) return most_far_limit_bytes;
  const auto rate = rate_.bytes_per_s();
  if (!rate) return unknown_limit_bytes_;
  const double round_trips = 2;
  return std::clamp(static_cast<std::size_t>(*rate * queue_s), least_limit_bytes, most_limit_bytes) +
         static_cast<std::size_t>(*rate * round_trips * min_rtt_s_);
}

double Rail::arrival_s(std::size_t bytes) const {
  const auto rate = rate_.bytes_per_s();
  return (rate ? static_cast<double>(outstanding_bytes() + bytes) / *rate : 0) + min_rtt_s_ / 2;
}

double Rail::room_s() const {
  constexpr double unknown_s = 0.001;
  const auto rate = rate_.bytes_per_s();
  if (is_far()) return min_rtt_s_ * chunk_round_trips;
  if (!rate) return unknown_s;
  return (static_cast<double>(outstanding_bytes()) - static_cast<double>(limit_bytes()) * refill_below) / *rate;
}

std::size_t Rail::chunk_bytes() const {
  const auto rate = rate_.bytes_per_s();
  constexpr std::size_t page_bytes = 4096;
  const double wanted_s = std::max(chunk_s, min_rtt_s_ * chunk_round_trips);
  const double by_window = static_cast<double>(window_bytes_) * chunk_windows;
  const std::size_t wanted =
      rate ? static_cast<std::size_t>(std::max(*rate * wanted_s, by_window)) : unknown_limit_bytes_ / 4;
  return std::clamp(wanted / page_bytes * page_bytes, least_chunk_bytes, max_chunk_bytes);
}

bool Rail::read_header() {
  Incoming& in = incoming_;
  if (in.has_header()) return true;
  if (has_ended_) return false;
  iovec piece{reinterpret_cast<std::byte*>(&in.header) + in.header_bytes, sizeof in.header - in.header_bytes};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  const ssize_t got = socket_.recv(message);
  if (got <= 0) {
    end_reading(got == 0 ? 0 : errno);
    return false;
  }
  count_read(static_cast<std::size_t>(got));
  in.header_bytes += static_cast<std::size_t>(got);
  return in.has_header();
}

std::size_t Rail::read_payload(std::span<const iovec> into) {
  if (has_ended_) return 0;
  std::array<iovec, max_pieces + 1> pieces;
  std::size_t count = 0;
  std::size_t wanted = 0;
  for (const iovec& piece : into) {
    if (count == max_pieces) break;
    pieces[count++] = piece;
    wanted += piece.iov_len;
  }
  if (wanted == incoming_.left_bytes()) pieces[count++] = {&next_header_, sizeof next_header_};
  msghdr message{};
  message.msg_iov = pieces.data();
  message.msg_iovlen = count;
  const ssize_t result = socket_.recv(message);
  if (result <= 0) {
    if (result < 0 && errno == EFAULT) throw StreamClosed{info().peer, EFAULT};  // no other rail could write there
    end_reading(result == 0 ? 0 : errno);
    return 0;
  }
  const std::size_t got = static_cast<std::size_t>(result);
  count_read(got);
  next_header_bytes_ = got > wanted ? got - wanted : 0;
  const std::size_t payload = std::min(got, wanted);
  incoming_.payload_bytes += payload;
  return payload;
}

void Rail::finish_frame() {
  incoming_.header = next_header_;
  incoming_.header_bytes = std::exchange(next_header_bytes_, 0);
  incoming_.payload_bytes = 0;
}

void Rail::count_read(std::size_t bytes) { add(received_bytes_, bytes); }

void Rail::end_reading(int error) {
  if (would_block(error)) return;
  has_ended_ = true;
  break_off(error);
}

void Rail::break_off(int error) {
  if (!is_living()) return;
  state_.store(State::broken, std::memory_order_relaxed);
  broken_at_ = Clock::now();
  error_ = error;
}

void Rail::check_connection(Clock::time_point) {
  if (!is_living()) return;
  constexpr int established = 1;  // TCP_ESTABLISHED, in a header that does not go together with this one
  if (tcp_info_of(fd()).value_or(tcp_info{}).tcpi_state != established) break_off(socket_error(fd()));
}

bool Rail::is_interface_down() const {
  ifreq request{};
  socket_.info.interface.copy(request.ifr_name, sizeof(request.ifr_name) - 1);
  if (::ioctl(fd(), SIOCGIFFLAGS, &request) != 0) return errno == ENODEV;
  return (request.ifr_flags & IFF_UP) == 0 || (request.ifr_flags & IFF_RUNNING) == 0;
}

bool Rail::is_stuck(Clock::duration timeout, Clock::time_point now) const {
  if (queue_.empty() || now - progress_at_ < timeout) return false;
  const tcp_info info = tcp_info_of(fd()).value_or(tcp_info{});
  return info.tcpi_retransmits >= repetitions_of_a_loss || info.tcpi_probes >= repetitions_of_a_loss;
}

bool Rail::is_unanswered() const { return holmes::is_unanswered(fd()); }

ChunkQueue Rail::retire() {
  state_.store(State::retired, std::memory_order_relaxed);
  written_chunks_ = partial_bytes_ = 0;
  pushed_bytes_ = acknowledged_bytes_;
  add(resent_chunks_, queue_.size());
  return std::exchange(queue_, {});
}

void Rail::shutdown() { ::shutdown(fd(), SHUT_RDWR); }

void Rail::append_info(std::vector<ConnectionInfo>& infos) const {
  infos.push_back(socket_.current_info());
  infos.back().sent_bytes = sent_bytes_.load(std::memory_order_relaxed);
  infos.back().received_bytes = received_bytes_.load(std::memory_order_relaxed);
  infos.back().is_retired = state() == State::retired;
  infos.back().resent_chunks = resent_chunks_.load(std::memory_order_relaxed);
}

}  // namespace holmes
