// Sends and receives of a GPU's memory: the messages are those of host memory, so either end may be either.
#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "holmes/core/descriptors.hpp"
#include "holmes/core/error.hpp"
#include "holmes/cuda/gpu_direct.hpp"
#include "holmes/p2p/p2p.hpp"

namespace holmes {

std::shared_ptr<cuda::PinnedRing> P2pEngine::ring(Rings& rings, int device) {
  auto& ring = rings[device];
  if (!ring) ring = std::make_shared<cuda::PinnedRing>(cuda::Device::get(device), group_.pinned_ring_bytes, waker());
  return ring;
}

// Makes the driver call `advance` again; from any thread.
std::function<void()> P2pEngine::waker() {
  if (wake_) return wake_;
  // Of its own: copies may outlive the engine.
  const auto wake_fd = std::make_shared<UniqueFd>(::fcntl(wake_fd_, F_DUPFD_CLOEXEC, 0));
  if (!*wake_fd)
    throw SystemError("cannot duplicate an event descriptor: " + errno_text(errno) + limit_text(errno),
                      {.rank = group_.rank, .peer = {}, .host = {}, .nic = {}, .system_errno = errno});
  wake_ = [wake_fd] {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t bytes = ::write(wake_fd->get(), &one, sizeof one);
  };
  return wake_;
}

std::unique_ptr<cuda::StagedRecv> P2pEngine::stage_recv(int peer, const Request& request, std::size_t done_bytes) {
  return std::make_unique<cuda::StagedRecv>(ring(peers_[peer].recv_rings, *request.buffer.device), request.buffer,
                                            request.begin, done_bytes);
}

// Null where a message of so many bytes goes through host memory.
P2pEngine::Begun P2pEngine::direct_for(int peer, const Request& request, std::size_t bytes) {
  const Channel& channel = *channels_[peer];
  const int gpu = *request.buffer.device;
  if (bytes < channel.lasting_bytes() || !channel.takes_device_memory(gpu)) return nullptr;
  auto begun = std::make_shared<std::atomic<bool>>(request.begin == nullptr);
  if (request.begin)
    cuda::Device::get(gpu).when_reached(request.begin, [begun, wake = waker()] {
      begun->store(true);
      wake();
    });
  return begun;
}

// Of the first message. Returns whether anything moved.
bool P2pEngine::send_direct(int peer) {
  Channel& channel = *channels_[peer];
  Sending& sending = peers_[peer].sends.front();
  if (sending.done_bytes < sizeof(Header)) {
    const iovec piece{reinterpret_cast<std::byte*>(&sending.header) + sending.done_bytes,
                      sizeof(Header) - sending.done_bytes};
    const std::size_t bytes = channel.try_send({&piece, 1});
    sending.done_bytes += bytes;
    return bytes > 0;
  }
  if (!sending.direct->load()) return false;
  const Buffer& buffer = sending.request.buffer;
  const std::size_t done_bytes = sending.done_bytes - sizeof(Header);
  const auto [bytes, is_refused] =
      channel.try_send_device({buffer.begin() + done_bytes, buffer.bytes() - done_bytes}, *buffer.device);
  if (is_refused && done_bytes + bytes < buffer.bytes()) {
    sending.staged = std::make_unique<cuda::StagedSend>(ring(peers_[peer].send_rings, *buffer.device), buffer,
                                                        sending.request.begin, done_bytes + bytes);
    sending.direct.reset();
  }
  if (bytes > 0) went(peer, bytes);
  return bytes > 0 || is_refused;
}

// Of the message that arrives. Returns its bytes that came; with none and no `direct` left the rest comes by the ring.
std::size_t P2pEngine::recv_direct(int peer) {
  Peer& state = peers_[peer];
  const Buffer& buffer = state.target->buffer;
  Channel::DeviceMove moved{0, state.ahead_bytes() > 0};
  if (!moved.is_refused) {
    if (!state.direct->load()) return 0;
    moved = channels_[peer]->try_recv_device(
        {buffer.begin() + state.payload_bytes, state.header.bytes - state.payload_bytes}, *buffer.device);
  }
  state.payload_bytes += moved.bytes;
  state.has_direct_bytes |= moved.bytes > 0;
  if (moved.is_refused) {
    state.staged = stage_recv(peer, *state.target, state.payload_bytes);
    state.direct.reset();
  }
  return moved.bytes;
}

// Copies of later messages begin while earlier ones are sent, in order, as far as slots are free.
void P2pEngine::fill_sends(Peer& state) {
  if (state.send_rings.empty()) return;
  for (Sending& sending : state.sends) {
    if (sending.direct) return;  // which may need the ring first
    if (sending.staged && !sending.staged->fill()) return;
  }
}

// Finishes receives that are in the GPU's memory. Returns whether anything moved.
bool P2pEngine::land(int peer) {
  Peer& state = peers_[peer];
  bool moved = false;
  for (auto it = state.landing.begin(); it != state.landing.end();) {
    while (it->staged && !it->staged->is_received()) {
      const std::span<std::byte> space = it->staged->space();
      if (space.empty()) break;
      std::memcpy(space.data(), it->payload.data() + it->fed_bytes, space.size());
      it->fed_bytes += space.size();
      it->staged->received(space.size());
      moved = true;
    }
    if (it->staged && !it->staged->has_landed()) {
      ++it;
      continue;
    }
    const int gpu = *it->request.buffer.device;
    if (it->staged) state.recv_rings[gpu]->collect();
    if (it->is_direct) cuda::flush_writes(cuda::Device::get(gpu));
    finish(it->request, peer, it->request.buffer.bytes());
    it = state.landing.erase(it);
    moved = true;
  }
  return moved;
}

}  // namespace holmes
