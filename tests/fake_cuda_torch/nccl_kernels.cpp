// NCCL's kernel for sends and receives without a GPU, against NCCL's own headers: what the device does with the buffers
// and counters that the proxy shares with it (device/sendrecv.h, protocol SIMPLE). Everything around it is NCCL's.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "collectives.h"
#include "device.h"
#include "fake_cuda.hpp"

namespace {

// One direction of a message on one channel.
struct Transfer {
  ncclConnInfo* conn;
  bool is_send;
  char* data;
  std::size_t bytes, chunk_bytes;
  std::size_t cursor = 0;
  std::uint64_t step = 0;
  bool is_begun = false, is_done = false;

  // Moves one chunk if the proxy is so far. Messages of a connection follow each other.
  bool advance() {
    if (!is_begun) {
      step = conn->step;
      if (!is_send) std::atomic_ref(*conn->head).store(step);
      is_begun = true;
    }
    const std::uint64_t seen = std::atomic_ref(is_send ? *conn->head : *conn->tail).load();
    if (seen + (is_send ? NCCL_STEPS : 0) < step + 1) return false;
    const std::size_t size = std::min(chunk_bytes, bytes - cursor);
    ncclConnFifo* const fifo = conn->connFifo == nullptr ? nullptr : conn->connFifo + step % NCCL_STEPS;
    char* slot = conn->buffs[NCCL_PROTO_SIMPLE];
    slot += fifo != nullptr && fifo->mode == NCCL_MODE_OFFSET ? fifo->offset
                                                              : static_cast<long>(step % NCCL_STEPS) * conn->stepSize;
    if (is_send && fifo != nullptr) fifo->size = static_cast<ssize_t>(size);
    if (is_send)
      std::memcpy(slot, data + cursor, size);
    else
      std::memcpy(data + cursor, slot, size);
    std::atomic_ref(is_send ? *conn->tail : *conn->head).store(++step);
    cursor += size;
    if (cursor == bytes) {
      conn->step = step;
      is_done = true;
    }
    return true;
  }
};

void add(std::vector<Transfer>& transfers, const ncclKernelComm& comm, int channel, ncclDevWorkP2p work) {
  if (work.sendNetReg || work.recvNetReg || work.sendIpcReg || work.recvIpcReg || work.sendProtoLL ||
      work.recvProtoLL) {
    std::fprintf(stderr, "fake kernels of NCCL: registered buffers and the protocol LL are not stood in for\n");
    std::abort();
  }
  if (work.sendRank == comm.rank) {
    std::memcpy(work.recvAddr, work.sendAddr, work.sendBytes);
    return;
  }
  for (const bool is_send : {false, true}) {
    const int parts = is_send ? work.nSendChannels : work.nRecvChannels;
    const int part = (channel - work.channelBase) & (work.nP2pChannels - 1);
    if (part >= parts) continue;
    std::size_t begin = 0, end = 0;
    ncclP2pPartBounds(parts, part, is_send ? work.sendBytes : work.recvBytes, &begin, &end);
    ncclDevChannelPeer* const peer = comm.channels[channel].peers[is_send ? work.sendRank : work.recvRank];
    transfers.push_back({.conn = is_send ? &peer->send[1] : &peer->recv[1],
                         .is_send = is_send,
                         .data = static_cast<char*>(is_send ? work.sendAddr : work.recvAddr) + begin,
                         .bytes = end - begin,
                         .chunk_bytes = u32fp8Decode(is_send ? work.sendChunkSize_u32fp8 : work.recvChunkSize_u32fp8)});
  }
}

void run(const std::vector<char>& storage) {
  const auto* const args = reinterpret_cast<const ncclDevKernelArgs*>(storage.data());
  const auto* const batches = reinterpret_cast<const ncclDevWorkBatch*>(args + 1);
  std::vector<Transfer> transfers;
  int block = 0;
  for (int channel = 0; channel < MAXCHANNELS; ++channel) {
    if ((args->channelMask >> channel & 1) == 0) continue;
    for (int at = block++;; at += static_cast<int>(batches[at].nextJump)) {
      const ncclDevWorkBatch& batch = batches[at];
      for (unsigned bit = 0; bit < 64; ++bit) {
        if ((batch.offsetBitset >> bit & 1) == 0) continue;
        const std::size_t offset = batch.offsetBase + bit * sizeof(ncclDevWorkP2p);
        const char* const base = args->workStorageType == ncclDevWorkStorageTypeArgs
                                     ? storage.data() + offset
                                     : static_cast<const char*>(args->workBuf) + (offset & args->workMask);
        ncclDevWorkP2p work;
        std::memcpy(&work, base, sizeof(work));
        add(transfers, *args->comm, channel, work);
      }
      if (batch.nextJump == 0) break;
    }
  }
  for (bool is_done = false; !is_done && *args->comm->abortFlag == 0;) {
    bool has_moved = false;
    is_done = true;
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      Transfer& one = transfers[i];
      if (one.is_done) continue;
      is_done = false;
      bool is_first = true;
      for (std::size_t j = 0; j < i; ++j)
        is_first = is_first && (transfers[j].is_done || transfers[j].conn != one.conn);
      if (is_first) has_moved = one.advance() || has_moved;
    }
    if (!has_moved) std::this_thread::yield();
  }
}

}  // namespace

// Whether it is a kernel that this stands in for; it is on the stream then.
bool fake_nccl_launch(const char* name, const void* arguments, std::size_t bytes, void* stream) {
  if (std::strstr(name, "ncclDevKernel_SendRecv") == nullptr) return false;
  const auto* const begin = static_cast<const char*>(arguments);
  fake_cuda_enqueue(stream, [storage = std::vector<char>(begin, begin + bytes)] { run(storage); });
  return true;
}
