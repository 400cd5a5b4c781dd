// ShmChannel: a byte stream to a rank of the same host through two rings in shared memory.
#pragma once

#include <functional>

#include "holmes/transport/channel.hpp"
#include "holmes/transport/ring_copy.hpp"

namespace holmes {

// The memory two ranks share: four rings (collective and p2p, each way). Every ring is mapped twice in a row, so that
// any part of it is contiguous. The channels of one pair share ownership; the descriptor is closed after mapping.
class ShmSegment {
public:
  // Bytes a segment with rings of `ring_bytes` (a multiple of the page size) needs.
  static std::size_t segment_bytes(std::size_t ring_bytes);
  // Ring size for a communicator of `size` ranks: the cache should hold all of a rank's rings.
  static std::size_t ring_bytes_for(int size);

  // Throws SystemError where the kernel refuses the mappings.
  ShmSegment(int fd, std::size_t bytes);
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  struct Ring;  // control words at the head of the segment
  Ring& ring(int index) const;
  std::byte* data(int index) const;
  std::size_t ring_bytes() const { return ring_bytes_; }

private:
  std::size_t mapped_bytes() const;

  std::size_t ring_bytes_ = 0;
  std::byte* base_ = nullptr;
};

class ShmChannel final : public Channel {
public:
  // `sender` and `receiver` are ring indices; `ring_doorbell` wakes the peer where it sleeps (any thread).
  ShmChannel(int peer, std::shared_ptr<ShmSegment> segment, int sender, int receiver,
             std::function<void()> ring_doorbell, ConnectionInfo info);

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  std::size_t lead_bytes() override { return segment_->ring_bytes() / 2; }
  std::size_t max_peek_bytes() const override { return segment_->ring_bytes(); }
  const std::byte* try_peek(std::size_t bytes) override;
  void consume(std::size_t bytes) override;
  bool tells_end() const override { return false; }  // a killed peer cannot mark its rings as closed
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  void finish_wait() override;
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  std::size_t readable_bytes() const;
  std::size_t writable_bytes();

  std::shared_ptr<ShmSegment> segment_;
  ShmSegment::Ring& out_;
  ShmSegment::Ring& in_;
  std::byte* out_data_;
  std::byte* in_data_;
  RingCopy copy_to_ring_;
  std::uint64_t produced_ = 0;  // own copies of what only this side writes
  std::uint64_t consumed_ = 0;
  std::uint64_t known_consumed_ = 0;   // what the peer had consumed when this side last looked
  std::uint64_t waited_produced_ = 0;  // what the peer had produced when this side last went to wait
  std::function<void()> ring_doorbell_;
  ConnectionInfo info_;
};

}  // namespace holmes
