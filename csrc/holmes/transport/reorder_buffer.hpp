// ReorderBuffer: chunks of a stream that came before their turn.
#pragma once

#include "holmes/transport/rail_frame.hpp"

namespace holmes {

// Holds chunks numbered less than `window_chunks` after the one that is due. Memory of a chunk is its frame; the buffer
// itself is a table of pointers.
class ReorderBuffer {
public:
  // Number of the chunk that is due.
  std::uint64_t next() const { return next_; }
  bool has_room_for(std::uint64_t sequence) const { return sequence - next_ < window_chunks; }  // not for past ones
  bool is_known(std::uint64_t sequence) const { return sequence < next_ || slot(sequence) != nullptr; }

  // A complete chunk that has room; returns false (and leaves the frame) where it is known already.
  bool insert(std::unique_ptr<Frame>& frame) {
    const std::uint64_t sequence = frame->header.sequence;
    if (is_known(sequence)) return false;
    slots_[sequence % window_chunks] = std::move(frame);
    return true;
  }
  // The due chunk, null while it is not here.
  const Frame* due() const { return slot(next_); }
  // Goes on to the next chunk; returns the frame of the old one, if it was here.
  std::unique_ptr<Frame> advance() { return std::move(slots_[next_++ % window_chunks]); }

private:
  const Frame* slot(std::uint64_t sequence) const {
    const Frame* frame = slots_[sequence % window_chunks].get();
    return frame != nullptr && frame->header.sequence == sequence ? frame : nullptr;
  }

  std::vector<std::unique_ptr<Frame>> slots_ = std::vector<std::unique_ptr<Frame>>(window_chunks);
  std::uint64_t next_ = 0;
};

}  // namespace holmes
