// Pace: how far a rank may send ahead of what it has received.
#pragma once

#include <cstddef>
#include <cstdint>

#include "holmes/group/group.hpp"

namespace holmes {

// Of one collective whose ranks all send and receive all the time. Bytes are those of a flow, header included.
class Pace {
public:
  // Whether it limits anything.
  bool is_kept() const { return lead_bytes_ > 0; }
  // `least_received_bytes`: from the peer of which least came; SIZE_MAX: all is here.
  void update(std::size_t least_received_bytes, const Group& group);
  // What may be sent now where so many bytes were sent before.
  std::size_t sendable_bytes(std::size_t sent_bytes) const {
    return sent_bytes < send_limit_ ? send_limit_ - sent_bytes : 0;
  }

private:
  std::size_t lead_bytes_ = 0;  // see Channel; 0: no pace is kept
  std::size_t lead_known_until_ = 0;
  std::size_t send_limit_ = SIZE_MAX;
};

}  // namespace holmes
