// Rail: one TCP connection of a striped stream: what is under way on it, how fast it is, whether it lives.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>

#include "holmes/core/work.hpp"
#include "holmes/transport/connection.hpp"
#include "holmes/transport/rail_frame.hpp"
#include "holmes/transport/socket.hpp"

namespace holmes {

// How fast a rail delivers, from what the peer acknowledged while the rail was busy.
// The kernel's own estimate (TCP_INFO) wavers with bursts of acknowledgements; this one averages over windows of
// `window` or more. A window counts in full only where the rail had bytes under way all the time; one that ended early
// tells the least that the rail can do. The first one also waits for `telling_bytes`: nothing at all acknowledged may
// be a busy processor, and who takes a rail for dead gives it nothing by which to learn better. On a far rail a window
// is a round trip.
class RailRate {
public:
  static constexpr auto window = std::chrono::milliseconds(10);
  static constexpr auto first_window = std::chrono::milliseconds(3);
  static constexpr auto longest_first_window = std::chrono::milliseconds(100);
  // Less may be acknowledged late because the peer's kernel waits for more.
  static constexpr std::size_t telling_bytes = 48 * 1024;

  // Bytes per second; absent: not known yet.
  std::optional<double> bytes_per_s() const { return rate_; }

  // Bytes were given to a rail that had none under way.
  void start(Clock::time_point now, std::uint64_t acknowledged_bytes) {
    start_ = now;
    start_bytes_ = acknowledged_bytes;
    from_idle_ = true;
  }
  // Acknowledgements come in bursts, one a round trip, and a lost packet holds them up for another one.
  void set_round_trip(Clock::duration round_trip) { window_ = std::max<Clock::duration>(window, round_trip); }
  // Whether `observe` would end a window.
  bool is_due(Clock::time_point now) const { return start_ && now - *start_ >= (rate_ ? window_ : first_window); }
  // `acknowledged_bytes`: so far. `is_busy`: more than the end of a message is still under way.
  void observe(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy);
  // The peer did not read: what happened in this window says nothing about the rail.
  void disregard(Clock::time_point now, std::uint64_t acknowledged_bytes, bool is_busy);

private:
  Clock::duration window_ = window;
  std::optional<double> rate_;
  std::optional<Clock::time_point> start_;
  std::uint64_t start_bytes_ = 0;
  bool from_idle_ = false;
};

// A rail that has room is taken where it delivers at most this much later than the best one: measured rates waver.
inline constexpr double lateness_allowed = 1.1;

// Of `rails` (pointers) the one on which what is sent next would arrive first; null where that one has no room now and
// `waits`: then waiting for it is better than any other. `arrival_s(rail)`: until what is sent next would have arrived.
// So rails of different speed carry shares in proportion.
template <class Rails, class Arrival>
auto first_to_deliver(const Rails& rails, bool waits, const Arrival& arrival_s) {
  decltype(&**rails.begin()) chosen = nullptr;
  double chosen_s = std::numeric_limits<double>::infinity();
  double earliest_s = chosen_s;
  for (const auto& rail : rails) {
    if (!rail->is_living()) continue;
    const bool has_room = rail->has_room();
    // While its rate is unknown, a rail is taken as long as it has room, and not waited for.
    if (!has_room && !rail->bytes_per_s()) continue;
    const double rail_s = arrival_s(*rail);
    earliest_s = std::min(earliest_s, rail_s);
    if (!has_room || rail_s >= chosen_s) continue;
    chosen = &*rail;
    chosen_s = rail_s;
  }
  return !waits || chosen_s <= earliest_s * lateness_allowed ? chosen : nullptr;
}

// What the system knows of a connection that has bytes under way.
struct ConnectionLook {
  bool is_full = false;             // the buffer: the socket takes no more
  std::size_t unsent_bytes = 0;     // in the socket
  std::size_t under_way_bytes = 0;  // sent and not acknowledged
  std::chrono::microseconds round_trip{};
  std::chrono::microseconds shortest{};  // round trip ever

  bool has_queue() const {
    constexpr double longest = 1.2;  // as the shortest one, queues of the hosts included
    return round_trip >= longest * shortest;
  }
  // The system has sent all that it took, and takes nothing until something is acknowledged.
  bool is_held_by_buffer() const {
    constexpr std::size_t small_share = 16;
    return is_full && unsent_bytes * small_share < under_way_bytes;
  }
};

// Whether a connection is slower than its path because of its buffer: the system has sent all that it took and takes
// nothing until something is acknowledged, and no packets wait in a queue on the way, so the path would carry more.
// (Where the path is full, round trips get longer.)
class ConnectionBound {
public:
  static constexpr int telling_looks = 3;  // after each other: a start, or a lost packet, looks like it for one or two

  // Once in a round trip at most.
  bool is_due(Clock::time_point now, Clock::duration round_trip) const { return now - looked_at_ >= round_trip; }
  void observe(Clock::time_point now, const ConnectionLook& look);
  bool is_buffer() const { return full_looks_ >= telling_looks; }

private:
  Clock::time_point looked_at_{};
  int full_looks_ = 0;
};

// bbr's start ends where three round trips found no rate that is higher by a quarter. Those do not count in which the
// sender had nothing unsent, as one whose buffer is smaller than the window that bbr wants never has: such a connection
// would go on to send at 2.9 times the rate that its path takes, and overflow the queues before it. Held at the rate
// that was found it has bytes unsent, and bbr ends its start by itself.
class BbrStart {
public:
  static constexpr std::uint64_t no_limit = ~std::uint64_t{0};
  static constexpr int telling_looks = 3;
  static constexpr int longest_held_looks = 16;  // what is sent may be too little to end it

  // Once in a round trip. `is_held_up`: the buffer is the limit, and packets wait on the way. (Where none do, more
  // connections help.) Returns the bytes per second at which to send from now on; absent: as before.
  std::optional<std::uint64_t> observe(const BbrLook& look, bool is_held_up);

private:
  bool is_held_ = false;
  int looks_ = 0;
  std::uint64_t most_bytes_per_s_ = 0;
};

// Keeps what it sent until the peer's kernel has acknowledged it: what is acknowledged can be read there even when the
// connection is lost, what is not goes out again on another rail.
// One thread at a time, `append_info` and `shutdown` excepted.
class Rail {
public:
  enum class State {
    living,
    broken,   // the system or the peer ended it; perhaps the whole stream ends
    retired,  // lost: nothing is sent on it any more. What arrives on it is still read.
  };
  // The frame that is arriving.
  struct Incoming {
    FrameHeader header;
    std::size_t header_bytes = 0;
    std::size_t payload_bytes = 0;
    std::unique_ptr<Frame> frame;  // where the payload goes when it came before its turn
    bool has_header() const { return header_bytes == sizeof(FrameHeader); }
    std::size_t left_bytes() const { return header.bytes - payload_bytes; }
  };

  Rail(Connection socket, int index);

  int index() const { return index_; }
  int fd() const { return socket_.fd.get(); }
  const ConnectionInfo& info() const { return socket_.info; }
  State state() const { return state_.load(std::memory_order_relaxed); }
  bool is_living() const { return state() == State::living; }

  // Lets little wait in the socket: what the system has not sent yet could still go another way. `most_far_bytes`:
  // where the peer is far.
  void limit_unsent(std::size_t most_far_bytes);

  // --- sending ---
  void push(Chunk chunk, Clock::time_point now);
  // Writes what the socket takes of what was pushed.
  void flush();
  bool pauses() const { return socket_.pauses(); }
  bool has_unwritten() const { return written_chunks_ < queue_.size(); }
  // Position in the stream before which everything pushed here is in the socket; absent: all is. Not of what was
  // copied.
  std::optional<std::uint64_t> first_unwritten() const;
  // When its pacer has to look; absent: it need not.
  std::optional<Clock::time_point> next_look() const;
  // Learns what the peer has acknowledged; its frames go to `pool`.
  void collect(Clock::time_point now, FramePool& pool);
  std::size_t outstanding_bytes() const { return pushed_bytes_ - acknowledged_bytes_; }
  // Lowest number of a chunk that is not acknowledged. Not of what was copied.
  std::optional<std::uint64_t> oldest_sequence() const;
  // What may be under way, so that no operation waits at its end for a slow rail.
  std::size_t limit_bytes() const;
  bool has_room() const { return is_living() && !has_unwritten() && outstanding_bytes() < limit_bytes(); }
  // Until `bytes` pushed now would be there, in seconds.
  double arrival_s(std::size_t bytes) const;
  // For each chunk that is not acknowledged: `visit(chunk, seconds until it would be)`. None where the rate is not
  // known.
  template <class Visit>
  void visit_unacknowledged(const Visit& visit);
  // Until there is room again, in seconds, as far as the rate tells.
  double room_s() const;
  // The right length of a chunk for the rail's speed.
  std::size_t chunk_bytes() const;
  std::optional<double> bytes_per_s() const { return rate_.bytes_per_s(); }
  const ConnectionBound& bound() const { return bound_; }
  // Others share the path from now on, or no longer.
  void look_anew();
  // What is under way where its path is full, as far as the rate is known.
  double path_bytes() const { return bytes_per_s().value_or(0) * min_rtt_s_; }
  bool is_far() const;
  // Its congestion control takes lost packets for a full path.
  bool heeds_loss() const { return heeds_loss_; }
  double min_rtt_s() const { return min_rtt_s_; }
  // Nothing is under way, and nothing was given for `duration`: its rate may be out of date.
  bool is_idle_for(Clock::duration duration, Clock::time_point now) const {
    return queue_.empty() && now - pushed_at_ >= duration;
  }

  // --- receiving ---
  Incoming& incoming() { return incoming_; }
  // Returns whether the header of the next frame is there.
  bool read_header();
  // Reads up to the frame's end (`into` is at most as long as what is left of it). Returns the bytes of payload.
  std::size_t read_payload(std::span<const iovec> into);
  // Goes on to the next frame.
  void finish_frame();
  // Whether bytes may be here that no poll tells of.
  bool may_hold_input() const { return socket_.may_hold_input(); }
  // Nothing comes any more.
  bool has_ended() const { return has_ended_; }

  // --- losses ---
  // Looks whether the connection stands; it becomes `broken` where not.
  void check_connection(Clock::time_point now);
  bool is_interface_down() const;
  // Nothing was acknowledged for `timeout`, though the system sent it again. (A peer that does not read is no loss.)
  bool is_stuck(Clock::duration timeout, Clock::time_point now) const;
  // The system sends again what the peer's does not acknowledge.
  bool is_unanswered() const;
  Clock::time_point progress_at() const { return progress_at_; }
  // When the peer's system acknowledged something last.
  Clock::time_point acknowledged_at() const { return acknowledged_at_; }
  Clock::time_point broken_at() const { return broken_at_; }
  int error() const { return error_; }
  // The chunks that are not acknowledged, in order, for other rails.
  ChunkQueue retire();

  void shutdown();
  void append_info(std::vector<ConnectionInfo>& infos) const;

private:
  void set_round_trip(std::chrono::microseconds shortest);
  void look_at_limit(Clock::time_point now);
  void end_reading(int error);
  void break_off(int error);
  void count_read(std::size_t bytes);

  Connection socket_;
  int index_;
  std::atomic<State> state_{State::living};
  Clock::time_point broken_at_{};
  int error_ = 0;
  bool has_ended_ = false;

  ChunkQueue queue_;  // not acknowledged
  std::size_t written_chunks_ = 0;
  std::size_t partial_bytes_ = 0;    // of the first chunk that is not written whole
  std::uint64_t pushed_bytes_ = 0;   // headers included, as the following
  std::uint64_t written_bytes_ = 0;  // taken by the socket
  std::uint64_t acknowledged_bytes_ = 0;
  std::uint64_t released_bytes_ = 0;  // of the frames that left the queue
  std::size_t unknown_limit_bytes_;   // while the rate is not known
  Clock::time_point pushed_at_{};
  Clock::time_point progress_at_{};  // something was acknowledged, or pushed on an idle rail
  Clock::time_point acknowledged_at_{};
  RailRate rate_;
  ConnectionBound bound_;
  BbrStart start_;
  double min_rtt_s_ = 0;
  std::size_t window_bytes_ = 0;           // TCP's, for congestion; 0: not known
  std::uint64_t receiver_limited_us_ = 0;  // as the system counts, for rate_
  bool heeds_loss_;

  Incoming incoming_;
  FrameHeader next_header_;  // read together with the end of a payload
  std::size_t next_header_bytes_ = 0;
  std::atomic<std::uint64_t> sent_bytes_{0};
  std::atomic<std::uint64_t> received_bytes_{0};
  std::atomic<std::uint64_t> resent_chunks_{0};  // since this rail was lost, on others
};

template <class Visit>
void Rail::visit_unacknowledged(const Visit& visit) {
  const auto rate = bytes_per_s();
  if (!rate) return;
  std::uint64_t end_bytes = released_bytes_;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    end_bytes += queue_[i].frame->wire_bytes();
    visit(queue_[i], static_cast<double>(end_bytes - acknowledged_bytes_) / *rate + min_rtt_s_);
  }
}

}  // namespace holmes
