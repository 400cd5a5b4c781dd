// RdmaLane: one queue pair of a channel, over one port: what was asked of it and how much of that is complete, how fast
// it reads, whether it lives. Which bytes go over which lane is the channel's affair.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "holmes/core/connection_info.hpp"
#include "holmes/transport/rail.hpp"
#include "holmes/transport/rdma/queue_pair.hpp"

namespace holmes {

// A part of what the peer offers, from `offset` on of what one receive takes of it.
struct RdmaRead {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::uint64_t request = 0;
};

class RdmaLane {
public:
  RdmaLane(std::unique_ptr<RdmaQueuePair> queue_pair, std::size_t number, ConnectionInfo info);

  RdmaQueuePair& pair() const { return *pair_; }
  std::size_t number() const { return number_; }
  std::uint64_t bit() const { return std::uint64_t{1} << number_; }
  const ConnectionInfo& info() const { return info_; }
  const std::string& port() const { return info_.interface; }

  // --- life ---
  bool is_living() const { return is_living_.load(std::memory_order_relaxed); }
  // Nothing is sent or comes over it any more, but for what has come before. Returns the reads that were under way.
  std::deque<RdmaRead> stop(Clock::time_point now);
  Clock::time_point stopped_at() const { return stopped_at_; }
  // All that came before it was stopped has been taken up.
  bool is_drained = false;
  bool has_company = false;  // other lanes live
  int inactive_looks = 0;
  std::optional<std::uint64_t> asked;  // the request whose acknowledgement shows that the path lives

  // --- requests ---
  // They are counted; each remembers up to where the stream is complete with it. Returns an errno; where there is no
  // room: EAGAIN. `before`: what is counted already and posted with it.
  int post(RdmaQueuePair::Write write, std::uint64_t position, const RdmaQueuePair::Write* before = nullptr);
  // Of `posted() + 1`, which the caller posts.
  void count_request(bool is_signaled, std::uint64_t position);
  bool is_signal_due(std::uint64_t position) const;
  // `id` and all before it are complete. Returns the position up to which the stream is.
  std::uint64_t complete(std::uint64_t id);
  std::uint64_t posted() const { return posted_; }
  std::uint64_t completed() const { return completed_; }
  // After `more` others.
  bool has_request(std::uint64_t more = 0) const {
    return posted_ + more - completed_ < RdmaQueuePair::data_send_depth;
  }
  // The stream goes over it from `position` on.
  void begin(std::uint64_t position) { unsignaled_from_ = position; }

  // Messages of the stream over it, and of these those for which receives are posted again.
  std::uint64_t sent_messages = 0;
  std::uint64_t credited_messages = 0;
  std::uint64_t arrived_messages = 0;
  std::uint64_t given_messages = 0;
  bool has_message(std::uint64_t more = 0) const {
    return sent_messages + more - credited_messages < RdmaQueuePair::data_depth && has_request(more);
  }

  // --- reads ---
  // `then`: what the peer is told once this and all reads before it are complete. Returns an errno.
  int read(const RdmaRead& piece, std::uint64_t address, std::uint32_t key, std::byte* to,
           const verbs::MemoryRegion& region, bool is_signaled, std::uint64_t position,
           std::optional<Clock::time_point> now, std::optional<RdmaQueuePair::Write> then = {});
  // Bytes of those that are complete since the last call; `now`: where its rate matters.
  std::size_t take_read_bytes(std::optional<Clock::time_point> now);
  bool has_room() const;
  bool is_reading() const { return !reads_.empty(); }
  std::optional<double> bytes_per_s() const { return rate_.bytes_per_s(); }
  double arrival_s(std::size_t bytes) const;
  std::uint64_t read_bytes() const { return read_bytes_; }
  std::uint64_t asked_bytes() const { return asked_bytes_; }

  // For reports, from any thread. Only the driver writes.
  std::atomic<std::uint64_t> sent_bytes{0};  // of the stream
  std::atomic<std::uint64_t> received_bytes{0};
  std::atomic<std::uint64_t> peer_read_bytes{0};
  static void count(std::atomic<std::uint64_t>& counter, std::size_t bytes) {
    counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  }
  void append_info(std::vector<ConnectionInfo>& infos) const;

private:
  std::unique_ptr<RdmaQueuePair> pair_;
  std::size_t number_;
  ConnectionInfo info_;
  std::atomic<bool> is_living_{true};
  Clock::time_point stopped_at_{};

  std::uint64_t posted_ = 0;
  std::uint64_t completed_ = 0;
  std::uint64_t signaled_to_ = 0;      // requests, the last of which is signaled
  std::uint64_t unsignaled_from_ = 0;  // position
  std::vector<std::uint64_t> ends_;    // by request

  std::deque<RdmaRead> reads_;
  std::uint64_t asked_bytes_ = 0;  // of reads, ever
  std::uint64_t read_bytes_ = 0;
  RailRate rate_;
};

}  // namespace holmes
