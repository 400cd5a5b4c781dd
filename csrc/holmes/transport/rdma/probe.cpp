#include "holmes/transport/rdma/probe.hpp"

#include <poll.h>

#include <array>
#include <cstring>
#include <optional>

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

bool RdmaProbe::post(const RdmaQueuePair::Write& write) {
  if (pair_.post(write) != 0) return false;
  ++under_way_;
  return true;
}

void RdmaProbe::look() {
  std::array<verbs::WorkCompletion, 32> ended;
  while (const std::size_t count = pair_.poll_sends(ended)) {
    under_way_ -= count;
    for (std::size_t i = 0; i < count; ++i) has_failed_ |= ended[i].status != verbs::Status::success;
  }
  while (const std::size_t count = pair_.poll_receives(ended)) heard_ += count;
}

template <typename Done>
bool RdmaProbe::await(Clock::time_point end, const Done& is_done) {
  while (true) {
    pair_.arm(RdmaQueuePair::Wake::any);
    look();
    if (has_failed_) return false;
    if (is_done()) return true;
    const auto left = end - Clock::now();
    if (left <= Duration::zero()) return false;
    pollfd one{pair_.fd(), POLLIN, 0};
    ::poll(&one, 1, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
    pair_.take_events();
  }
}

bool RdmaProbe::reaches(Duration timeout) {
  const auto end = Clock::now() + timeout;
  return post({.is_signaled = true}) && await(end, [this] { return under_way_ == 0; });
}

bool RdmaProbe::meets(Duration timeout) {
  const auto end = Clock::now() + timeout;
  if (!post({.immediate = 0, .is_signaled = true, .is_solicited = true})) return false;
  if (!await(end, [this] { return heard_ > 0 && under_way_ == 0; })) return false;
  --heard_;
  return true;
}

double RdmaProbe::carries(Duration warm, Duration count) {
  constexpr std::size_t depth = 32;
  constexpr auto patience = std::chrono::seconds(1);
  const RdmaRings& rings = *pair_.rings();
  const auto end = Clock::now() + warm + count;
  std::optional<Clock::time_point> began;  // an acknowledgement after `warm`, from which what follows is counted
  std::uint64_t bytes = 0;
  auto now = Clock::now();
  while (now < end) {
    while (under_way_ < depth)
      if (!post({.from = rings.send_ring(),
                 .bytes = rings.bytes(),
                 .remote_offset = rings.receive_offset(),
                 .is_signaled = true}))
        return 0;
    const std::size_t before = under_way_;
    if (!await(end + patience, [&] { return under_way_ < before; })) return 0;
    now = Clock::now();
    if (began) bytes += (before - under_way_) * rings.bytes();
    if (!began && now >= end - count) began = now;
  }
  if (!await(end + patience, [this] { return under_way_ == 0; }) || bytes == 0) return 0;
  return static_cast<double>(bytes) / std::chrono::duration<double>(now - *began).count();
}

}  // namespace holmes
