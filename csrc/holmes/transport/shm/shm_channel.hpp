// ShmChannel: a byte stream to a rank of the same host through two rings in shared memory. Where a copy out of the
// sender's memory costs less than one into a ring and one out of it, larger pieces are shown to the receiver instead.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "holmes/core/types.hpp"
#include "holmes/transport/channel.hpp"
#include "holmes/transport/shm/cma.hpp"
#include "holmes/transport/shm/copy_tuning.hpp"
#include "holmes/transport/shm/ring_line.hpp"
#include "holmes/transport/stage.hpp"

namespace holmes {

// The memory two ranks share: four rings (two of collectives, two of messages, each way). Every ring is mapped twice in
// a row, so that any part of it is contiguous. The channels of one pair share ownership; the descriptor is closed after
// mapping.
class ShmSegment {
public:
  // Of one ring; multiples of the page size.
  struct RingBytes {
    std::size_t collective;
    std::size_t p2p;
  };
  static std::size_t segment_bytes(RingBytes bytes);
  // For a communicator of `size` ranks.
  static RingBytes ring_bytes_for(int size);

  // Throws SystemError where the kernel refuses the mappings.
  ShmSegment(int fd, RingBytes bytes);
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  static constexpr std::size_t cache_line_bytes = 64;
  // Control words at the head of the segment. Each has its own cache line: the writer of one never disturbs the reader
  // of another.
  struct Ring {
    RingLine line;
    alignas(cache_line_bytes) std::atomic<std::uint64_t> consumed;
    alignas(cache_line_bytes) std::atomic<std::uint32_t> reader_sleeps;
    alignas(cache_line_bytes) std::atomic<std::uint32_t> writer_sleeps;
    alignas(cache_line_bytes) std::atomic<std::uint32_t> closed;
    CmaRegion cma;
  };
  Ring& ring(int index) const;
  std::byte* data(int index) const;
  std::size_t ring_bytes(int index) const { return index < ring_count / 2 ? bytes_.collective : bytes_.p2p; }

private:
  static constexpr int ring_count = 4;
  std::size_t mapped_bytes() const { return 2 * segment_bytes(bytes_) - page_bytes(); }

  RingBytes bytes_;
  std::byte* base_ = nullptr;
};

class ShmChannel final : public Channel {
public:
  // How long what is to be copied out of this rank's memory waits for the receiver, once there is nothing else to do.
  // One that shares this rank's processor comes when this one sleeps.
  static constexpr Duration default_patience = std::chrono::milliseconds(2);
  // `sender` and `receiver` are ring indices; `ring_doorbell` wakes the peer where it sleeps (any thread). `messages`:
  // of the channels that carry the rank's messages; null: this one carries collectives.
  ShmChannel(int peer, std::shared_ptr<ShmSegment> segment, int sender, int receiver,
             std::function<void()> ring_doorbell, CmaUse cma, ConnectionInfo info,
             std::shared_ptr<MessageBytes> messages = nullptr, Duration patience = default_patience);

  std::size_t try_send(std::span<const iovec> pieces) override;
  std::size_t try_recv(std::span<const iovec> pieces) override;
  // What is in the ring is to be in the caches yet when the peer reads it.
  std::size_t lead_bytes() override { return ring_bytes_ / 2; }
  // (2 ranks, all_gather in steps of 1 MiB by CMA: 8 MiB took 1.4 times as long, 64 MiB 1.2.)
  bool keeps_pace() const override { return !tuning_.prefers_sender_memory(); }
  CmaUse cma_use() const override { return tuning_.use(); }
  bool may_read_in_place() const override { return may_pull_; }
  void set_receives_meanwhile(bool receives) override { tuning_.set_receives_meanwhile(receives); }
  void set_way(std::optional<CopyWay> way, bool bypass_cache) override {
    tuning_.set(way);
    seen_.set_bypass(bypass_cache);
  }
  bool was_refused_in_place() override { return std::exchange(was_refused_in_place_, false); }
  std::size_t max_peek_bytes() const override { return ring_bytes_; }
  const std::byte* try_peek(std::size_t bytes) override;
  void consume(std::size_t bytes) override;
  bool takes_short(std::size_t /*in_a_row*/) const override { return true; }
  std::size_t short_room_bytes() override;
  std::size_t send_short(std::span<const iovec> pieces, bool later) override;
  ShortView view_short(std::size_t wanted) override;
  bool tells_end() const override { return in_.closed.load() != 0; }  // a killed peer cannot mark its rings as closed
  bool prepare_wait(bool for_recv, bool for_send, std::vector<pollfd>& fds) override;
  std::optional<Clock::time_point> next_look() const override { return withdraws_at(); }
  void finish_wait(Clock::time_point now, std::span<const pollfd> asked) override;
  void shutdown() override;
  void append_info(std::vector<ConnectionInfo>& infos) const override;

private:
  std::size_t readable_bytes() const;
  std::uint64_t used_bytes();
  std::size_t writable_bytes();
  std::size_t send_new(std::span<const iovec> pieces);
  BufferPlace place_to_show(const iovec& piece) const;
  std::size_t bytes_to_show(std::span<const iovec> pieces, const BufferPlace& place) const;
  void look_at_cma();
  std::optional<Clock::time_point> withdraws_at() const;
  void withdraw_cma();
  void wake_reader();
  std::size_t recv_from_ring(std::span<const iovec> pieces);
  std::size_t pull(std::span<const iovec> pieces, std::size_t bytes);
  void took(std::size_t bytes);
  void stage(std::size_t bytes);
  void take(std::size_t bytes);
  void tell_consumed();
  void wrote(std::size_t bytes);
  void wake_writer();

  std::shared_ptr<ShmSegment> segment_;
  ShmSegment::Ring& out_;
  ShmSegment::Ring& in_;
  std::size_t ring_bytes_;
  std::byte* out_at_;  // where the next byte goes, before the ring's end
  std::byte* out_end_;
  std::byte* in_at_;  // where the next one comes from
  std::byte* in_end_;
  RingCopy copy_to_ring_;
  CmaSender shown_;
  Clock::time_point shown_at_{};
  Duration patience_;
  CmaReceiver seen_;
  bool may_pull_;
  ChannelTuning tuning_;
  std::size_t unreported_ = 0;  // bytes of the CMA region that are gone, but that no call of try_send has returned yet
  bool was_refused_in_place_ = false;
  bool is_held_ = false;       // what try_peek gave is in the peer's memory
  std::size_t ring_only_ = 0;  // bytes that the receiver did not come for: they go into the ring
  Stage stage_;                // what was peeked at and is not in the ring in one piece
  // Own copies of what only this side writes. Bytes that go by CMA are counted too; they have no place in the ring.
  std::uint64_t produced_ = 0;
  std::uint64_t consumed_ = 0;         // also what is staged
  std::uint64_t told_consumed_ = 0;    // what the peer sees of that
  std::uint64_t known_consumed_ = 0;   // what the peer had consumed when this side last looked
  std::uint64_t waited_produced_ = 0;  // what the peer had produced when this side last went to wait
  std::uint64_t waited_cma_ = 0;       // state of its CMA region then
  RingLine::Note note_{};              // what peek_short gave, where it came as one
  std::function<void()> ring_doorbell_;
  ConnectionInfo info_;
};

}  // namespace holmes
