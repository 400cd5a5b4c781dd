#include "holmes/transport/rdma/probe.hpp"

#include <poll.h>

#include <array>
#include <cstring>

#include "holmes/core/error.hpp"

namespace holmes {

RdmaProbe::RdmaProbe(const std::shared_ptr<const RdmaDevice>& device, std::size_t ring_bytes)
    : pair_(device, std::make_shared<RdmaRings>(ring_bytes, device->name())) {}

std::string RdmaProbe::endpoint() const {
  const RdmaEndpoint own = pair_.endpoint();
  return {reinterpret_cast<const char*>(&own), sizeof own};
}

void RdmaProbe::connect(const std::string& peer) {
  RdmaEndpoint theirs;
  if (peer.size() != sizeof theirs)
    throw ProtocolError("a peer says of its queue pair what makes no sense; all processes must run the same version",
                        {.nic = pair_.device().name()});
  std::memcpy(&theirs, peer.data(), sizeof theirs);
  pair_.connect(theirs);
}

bool RdmaProbe::reaches(Duration timeout) {
  const auto end = Clock::now() + timeout;
  if (pair_.post({.is_signaled = true}) != 0) return false;
  std::array<verbs::WorkCompletion, 1> answered;
  while (true) {
    pair_.arm(RdmaQueuePair::Wake::any);
    if (pair_.poll_sends(answered) > 0) return answered.front().status == verbs::Status::success;
    const auto left = end - Clock::now();
    if (left <= Duration::zero()) return false;
    pollfd one{pair_.fd(), POLLIN, 0};
    ::poll(&one, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
    pair_.take_events();
  }
}

}  // namespace holmes
