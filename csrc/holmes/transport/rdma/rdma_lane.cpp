#include "holmes/transport/rdma/rdma_lane.hpp"

#include <array>
#include <cerrno>
#include <span>
#include <utility>

namespace holmes {
namespace {

// Of the requests in a row one is signaled at least; what it tells frees those before it.
constexpr std::uint64_t signal_every = 16;
// Where several lanes read: while one is carried out, the next one waits in the HCA.
constexpr std::size_t reads_at_once = 2;

}  // namespace

RdmaLane::RdmaLane(std::unique_ptr<RdmaQueuePair> queue_pair, std::size_t number, ConnectionInfo info)
    : pair_(std::move(queue_pair)), number_(number), info_(std::move(info)), ends_(RdmaQueuePair::send_depth) {
  info_.transport = "rdma";
  info_.interface = pair_->device().name();
  info_.local_address = pair_->endpoint().text();
  info_.remote_address = pair_->peer().text();
  info_.device_bound = true;
}

std::deque<RdmaRead> RdmaLane::stop(Clock::time_point now) {
  is_living_.store(false, std::memory_order_relaxed);
  stopped_at_ = now;
  asked.reset();
  pair_->stop();
  return std::exchange(reads_, {});
}

int RdmaLane::post(RdmaQueuePair::Write write, std::uint64_t position, const RdmaQueuePair::Write* before) {
  if (posted_ - completed_ >= RdmaQueuePair::send_depth - 2) return EAGAIN;  // one is kept for the end
  write.is_signaled |= is_signal_due(position);
  write.id = posted_ + 1;
  const std::array both{before ? *before : write, write};
  if (const int error = pair_->post_all(std::span(both).last(before ? 2 : 1))) return error;
  count_request(write.is_signaled, position);
  return 0;
}

bool RdmaLane::is_signal_due(std::uint64_t position) const {
  return posted_ + 1 - signaled_to_ >= signal_every || position - unsignaled_from_ >= pair_->rings()->bytes() / 4;
}

void RdmaLane::count_request(bool is_signaled, std::uint64_t position) {
  ends_[posted_++ % ends_.size()] = position;
  if (is_signaled) signaled_to_ = posted_, unsignaled_from_ = position;
}

std::uint64_t RdmaLane::complete(std::uint64_t id) {
  completed_ = id;
  if (asked && *asked < completed_) asked.reset();
  return ends_[(completed_ - 1) % ends_.size()];
}

int RdmaLane::read(const RdmaRead& piece, std::uint64_t address, std::uint32_t key, std::byte* to,
                   const verbs::MemoryRegion& region, bool is_signaled, std::uint64_t position,
                   std::optional<Clock::time_point> now, std::optional<RdmaQueuePair::Write> then) {
  if (then) then->id = posted_ + 2, then->is_fenced = true;
  if (const int error = pair_->post_read(address, key, to, piece.bytes, region, is_signaled ? posted_ + 1 : 0,
                                         then ? &*then : nullptr))
    return error;
  if (now && reads_.empty()) rate_.start(*now, read_bytes_);
  reads_.push_back({piece.offset, piece.bytes, posted_ + 1});
  asked_bytes_ += piece.bytes;
  count_request(is_signaled, position);
  if (then) count_request(then->is_signaled, position);
  return 0;
}

std::size_t RdmaLane::take_read_bytes(std::optional<Clock::time_point> now) {
  std::size_t bytes = 0;
  for (; !reads_.empty() && reads_.front().request <= completed_; reads_.pop_front()) bytes += reads_.front().bytes;
  if (bytes == 0) return 0;
  read_bytes_ += bytes;
  count(received_bytes, bytes);
  if (now) rate_.observe(*now, read_bytes_, !reads_.empty());
  return bytes;
}

bool RdmaLane::has_room() const { return has_request() && (!has_company || reads_.size() < reads_at_once); }

double RdmaLane::arrival_s(std::size_t bytes) const {
  const auto rate = rate_.bytes_per_s();
  return rate ? static_cast<double>(asked_bytes_ - read_bytes_ + bytes) / *rate : 0;
}

void RdmaLane::append_info(std::vector<ConnectionInfo>& infos) const {
  infos.push_back(info_);
  infos.back().is_retired = !is_living();
  infos.back().sent_bytes =
      sent_bytes.load(std::memory_order_relaxed) + peer_read_bytes.load(std::memory_order_relaxed);
  infos.back().received_bytes = received_bytes.load(std::memory_order_relaxed);
}

}  // namespace holmes
