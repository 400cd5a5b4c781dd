// Pace: how far a rank may send to one peer ahead of the others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "holmes/group/group.hpp"

namespace holmes {

// What a collective's sends keep pace with. What waits in between stays in the cache then.
enum class Pacing {
  none,
  by_received,  // what has come from every peer: all ranks send and receive all the time
  by_share,     // the same of flows of any length: the share of each that has come. (Cuts them anywhere, so not where
                // slices are peeked at: a CheckedChannel's frames would cut these.)
  by_sent,      // what every other peer has taken
};

// Of one collective. Bytes are those of a flow, header included.
class Pace {
public:
  // What has moved with the peer with which least has.
  struct Least {
    std::size_t bytes = SIZE_MAX;   // SIZE_MAX: all has, with every peer
    std::optional<double> share{};  // of its flow; absent: bytes count
  };

  // Whether it limits anything.
  bool is_kept() const { return lead_bytes_ > 0; }
  void update(const Least& least, const Group& group) {
    // Paths get known while they are used.
    constexpr std::size_t known_bytes = 4 * 1024 * 1024;
    if (least.bytes != SIZE_MAX && least.bytes >= lead_known_until_) {
      lead_known_until_ = least.bytes + known_bytes;
      for (int peer = 0; peer < group.size; ++peer)
        if (peer != group.rank && group.channels[peer]->keeps_pace())
          lead_bytes_ = std::max(lead_bytes_, group.channels[peer]->lead_bytes());
    }
    least_ = least;
  }
  // What may be sent now of a flow of `total_bytes`, of which so many were sent before.
  std::size_t sendable_bytes(std::size_t sent_bytes, std::size_t total_bytes) const {
    if (!is_kept() || least_.bytes == SIZE_MAX) return SIZE_MAX;
    const auto all = static_cast<double>(total_bytes);
    const std::size_t limit =
        lead_bytes_ + (least_.share ? static_cast<std::size_t>(*least_.share * all) : least_.bytes);
    return sent_bytes < limit ? limit - sent_bytes : 0;
  }

private:
  std::size_t lead_bytes_ = 0;  // see Channel; 0: no pace is kept
  std::size_t lead_known_until_ = 0;
  Least least_;
};

}  // namespace holmes
