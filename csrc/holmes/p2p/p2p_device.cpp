// Sends and receives of a GPU's memory: the messages are those of host memory, so either end may be either.
#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/p2p/p2p.hpp"

namespace holmes {

std::shared_ptr<cuda::PinnedRing> P2pEngine::ring(Rings& rings, int device) {
  auto& ring = rings[device];
  if (ring) return ring;
  // Of its own: copies may outlive the engine.
  const auto wake_fd = std::make_shared<UniqueFd>(::fcntl(wake_fd_, F_DUPFD_CLOEXEC, 0));
  if (!*wake_fd)
    throw SystemError("cannot duplicate an event descriptor: " + errno_text(errno) + limit_text(errno),
                      {.rank = group_.rank, .peer = {}, .host = {}, .nic = {}, .system_errno = errno});
  ring = std::make_shared<cuda::PinnedRing>(cuda::Device::get(device), group_.pinned_ring_bytes, [wake_fd] {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t bytes = ::write(wake_fd->get(), &one, sizeof one);
  });
  return ring;
}

std::unique_ptr<cuda::StagedRecv> P2pEngine::stage_recv(int peer, const Request& request) {
  return std::make_unique<cuda::StagedRecv>(ring(peers_[peer].recv_rings, *request.buffer.device), request.buffer,
                                            request.begin);
}

// Copies of later messages begin while earlier ones are sent, in order, as far as slots are free.
void P2pEngine::fill_sends(Peer& state) {
  if (state.send_rings.empty()) return;
  for (Sending& sending : state.sends)
    if (sending.staged && !sending.staged->fill()) return;
}

// Finishes receives that are in the GPU's memory. Returns whether anything moved.
bool P2pEngine::land(int peer) {
  Peer& state = peers_[peer];
  bool moved = false;
  for (auto it = state.landing.begin(); it != state.landing.end();) {
    while (!it->staged->is_received()) {
      const std::span<std::byte> space = it->staged->space();
      if (space.empty()) break;
      std::memcpy(space.data(), it->payload.data() + it->fed_bytes, space.size());
      it->fed_bytes += space.size();
      it->staged->received(space.size());
      moved = true;
    }
    if (!it->staged->has_landed()) {
      ++it;
      continue;
    }
    state.recv_rings[*it->request.buffer.device]->collect();
    finish(it->request, peer, it->request.buffer.bytes());
    it = state.landing.erase(it);
    moved = true;
  }
  return moved;
}

}  // namespace holmes
