// Pace: how far a rank may send to one peer ahead of the others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "holmes/group/group.hpp"

namespace holmes {

// What a collective's sends keep pace with. What waits in between stays in the cache then.
enum class Pacing {
  none,
  by_received,  // what has come from every peer: all ranks send and receive all the time
  by_sent,      // what every other peer has taken
};

// Of one collective. Bytes are those of a flow, header included.
class Pace {
public:
  // Whether it limits anything.
  bool is_kept() const { return lead_bytes_ > 0; }
  // `least_bytes`: of the peer with which least has moved; SIZE_MAX: all has.
  void update(std::size_t least_bytes, const Group& group) {
    // Paths get known while they are used.
    constexpr std::size_t known_bytes = 4 * 1024 * 1024;
    if (least_bytes != SIZE_MAX && least_bytes >= lead_known_until_) {
      lead_known_until_ = least_bytes + known_bytes;
      for (int peer = 0; peer < group.size; ++peer)
        if (peer != group.rank) lead_bytes_ = std::max(lead_bytes_, group.channels[peer]->lead_bytes());
    }
    send_limit_ = least_bytes == SIZE_MAX ? SIZE_MAX : least_bytes + lead_bytes_;
  }
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
