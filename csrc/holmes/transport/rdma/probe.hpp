// RdmaProbe: tries whether a port reaches another one, by a queue pair of each.
#pragma once

#include <memory>
#include <string>

#include "holmes/core/clock.hpp"
#include "holmes/transport/rdma/queue_pair.hpp"

namespace holmes {

// One thread at a time.
class RdmaProbe {
public:
  // Throws SystemError as RdmaQueuePair. Nothing is ever in the ring: a large one tries whether there is room for it.
  explicit RdmaProbe(const std::shared_ptr<const RdmaDevice>& device, std::size_t ring_bytes = 4096);

  // Bytes for the other end's connect().
  std::string endpoint() const;
  // Throws ProtocolError where that is none, NicError where the HCA knows no way to it.
  void connect(const std::string& peer);
  // Whether the other end's HCA acknowledges a write within the time; it must be connected to this one. The other
  // process has nothing to do.
  bool reaches(Duration timeout);

private:
  RdmaQueuePair pair_;
};

}  // namespace holmes
