#include "holmes/collectives/pace.hpp"

#include <algorithm>

namespace holmes {

void Pace::update(std::size_t least_received_bytes, const Group& group) {
  // Paths get known while they are used.
  constexpr std::size_t known_bytes = 4 * 1024 * 1024;
  if (least_received_bytes != SIZE_MAX && least_received_bytes >= lead_known_until_) {
    lead_known_until_ = least_received_bytes + known_bytes;
    for (int peer = 0; peer < group.size; ++peer)
      if (peer != group.rank) lead_bytes_ = std::max(lead_bytes_, group.channels[peer]->lead_bytes());
  }
  send_limit_ = least_received_bytes == SIZE_MAX ? SIZE_MAX : least_received_bytes + lead_bytes_;
}

}  // namespace holmes
