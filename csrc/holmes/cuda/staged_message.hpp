// StagedSend, StagedRecv: one message of a GPU's memory on its way through a PinnedRing, slot by slot, so that the
// copies of one part and the transfer of another go on side by side.
#pragma once

#include <deque>
#include <span>

#include "holmes/cuda/pinned_ring.hpp"

namespace holmes::cuda {

// One thread at a time, the one that uses the ring. Messages of a ring are sent one after the other; a later one may be
// filled while an earlier one is sent.
class StagedSend {
public:
  // Copies begin after `begin`. Of the buffer's bytes the first `done_bytes` have gone another way.
  StagedSend(std::shared_ptr<PinnedRing> ring, Buffer buffer, EventPtr begin, std::size_t done_bytes = 0);

  // Starts copies while slots are free. Returns whether every part of the message has been started; then the next
  // message may be filled.
  bool fill();
  // What can be sent now, contiguous; empty while the next copy runs. Until `sent`.
  std::span<const std::byte> ready() const;
  void sent(std::size_t bytes);
  // ", 4096 bytes copied from the GPU": how far its copies are.
  std::string state_text() const;

private:
  struct Part {
    int slot;
    PinnedRing::Ticket ticket;
    std::size_t bytes;
  };
  std::shared_ptr<PinnedRing> ring_;
  Buffer buffer_;
  EventPtr begin_;
  std::size_t started_bytes_ = 0;
  std::size_t sent_bytes_ = 0;  // of the parts that were sent whole
  std::size_t front_sent_bytes_ = 0;
  std::deque<Part> parts_;
};

// As StagedSend. Destroyed early (its operation failed) it leaves running copies to the ring.
class StagedRecv {
public:
  StagedRecv(std::shared_ptr<PinnedRing> ring, Buffer buffer, EventPtr begin, std::size_t done_bytes = 0);
  StagedRecv(StagedRecv&& other) = delete;
  ~StagedRecv();

  // Where the next bytes go; empty while no slot is free.
  std::span<std::byte> space();
  std::size_t space_bytes() const;
  // `bytes` of `space` were written. Starts the copy of a full slot.
  void received(std::size_t bytes);
  std::string state_text() const { return ring_->error_text(); }
  bool is_received() const { return received_bytes_ == buffer_.bytes(); }
  // Whether the whole message is in the GPU's memory.
  bool has_landed() const { return is_received() && ring_->has_ended(last_ticket_); }

private:
  std::shared_ptr<PinnedRing> ring_;
  Buffer buffer_;
  EventPtr begin_;
  int slot_ = -1;
  std::size_t slot_filled_bytes_ = 0;
  std::size_t received_bytes_ = 0;
  PinnedRing::Ticket last_ticket_ = 0;
};

}  // namespace holmes::cuda
