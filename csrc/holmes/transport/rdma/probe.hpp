// RdmaProbe: tries whether a port reaches another one, and what that carries, by a queue pair of each.
#pragma once

#include <memory>
#include <string>

#include "holmes/core/clock.hpp"
#include "holmes/transport/rdma/queue_pair.hpp"

namespace holmes {

// One thread at a time.
class RdmaProbe {
public:
  // Throws SystemError as RdmaQueuePair. `ring_bytes`: of one write of `carries`, a power of two, and the same on the
  // other end; a large one tries whether there is room for it.
  explicit RdmaProbe(const std::shared_ptr<const RdmaDevice>& device, std::size_t ring_bytes = 4096);

  // Bytes for the other end's connect().
  std::string endpoint() const;
  // Throws ProtocolError where that is none, NicError where the HCA knows no way to it.
  void connect(const std::string& peer);
  // Whether the other end's HCA acknowledges a write within the time; it must be connected to this one. The other
  // process has nothing to do.
  bool reaches(Duration timeout);
  // Whether the other end's process calls it too within the time.
  bool meets(Duration timeout);
  // Bytes a second that the other end's HCA acknowledges, for `count` after `warm`; 0 where it stops doing so. The
  // other process has nothing to do.
  double carries(Duration warm, Duration count);

private:
  bool post(const RdmaQueuePair::Write& write);
  // Takes what has ended.
  void look();
  // Looks until `is_done`, or `end`; returns whether it is, and all went well.
  template <typename Done>
  bool await(Clock::time_point end, const Done& is_done);

  RdmaQueuePair pair_;
  std::size_t under_way_ = 0;  // writes
  std::size_t heard_ = 0;      // calls of the other end's `meets`
  bool has_failed_ = false;
};

}  // namespace holmes
