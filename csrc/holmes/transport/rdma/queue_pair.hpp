// RdmaQueuePair: a reliable-connected queue pair, its completion queues and the memory, registered with its HCA, that
// it moves bytes from and into.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "holmes/transport/rdma/device.hpp"
#include "holmes/transport/rdma/rings.hpp"

namespace holmes {

// How a peer reaches a queue pair and its memory; sent as it is (little-endian machines only; checked by the
// handshake).
struct RdmaEndpoint {
  static constexpr std::uint32_t right_magic = 0x31'4d'44'52;  // "RDM1"
  std::uint32_t magic = right_magic;
  std::uint32_t qp_number = 0;
  std::uint32_t psn = 0;
  std::uint32_t key = 0;
  std::uint64_t address = 0;
  std::uint64_t ring_bytes = 0;
  verbs::Gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;
  std::uint8_t link_layer = 0;
  std::uint32_t unused = 0;

  std::string text() const;  // "::ffff:10.0.0.1 qp 17"
};
static_assert(sizeof(RdmaEndpoint) == 56);

// One thread at a time, but for post().
class RdmaQueuePair {
public:
  // Messages that may be under way for which the receiver must have posted a receive, and how many of them are data.
  static constexpr std::uint32_t receive_depth = 288;
  static constexpr std::uint32_t data_depth = 256;
  // Sends that are not known to be complete, and how many of them are data.
  static constexpr std::uint32_t send_depth = 320;
  static constexpr std::uint32_t data_send_depth = 288;

  // Throws SystemError where memory cannot be registered (the limit of locked memory) or the HCA is out of something.
  RdmaQueuePair(std::shared_ptr<const RdmaDevice> device, std::shared_ptr<RdmaRings> rings);
  RdmaQueuePair(const RdmaQueuePair&) = delete;
  RdmaQueuePair& operator=(const RdmaQueuePair&) = delete;
  ~RdmaQueuePair();

  const RdmaDevice& device() const { return *device_; }
  RdmaEndpoint endpoint() const;
  // To the peer's, whose endpoint is checked. Throws ProtocolError, NicError, SystemError.
  void connect(const RdmaEndpoint& peer);
  const RdmaEndpoint& peer() const { return peer_; }
  // To a peer, by port and GIDs: "mlx5_0:1 fe80::1 -> fe80::2".
  std::string path_to(const RdmaEndpoint& peer) const;

  const std::shared_ptr<RdmaRings>& rings() const { return rings_; }

  // A write of `bytes` from `from` (in registered memory, or anywhere where it is inline) into the peer's memory, with
  // or without an immediate value. Returns 0 or an errno. Any thread.
  struct Write {
    const void* from = nullptr;
    std::size_t bytes = 0;
    std::uint64_t remote_offset = 0;  // in the peer's memory
    std::optional<std::uint32_t> immediate{};
    bool is_signaled = false;
    bool is_solicited = false;  // wakes a peer that waits for no less
    std::uint64_t id = 0;
    bool is_fenced = false;                       // begins when the reads before it are complete
    const verbs::MemoryRegion* region = nullptr;  // that `from` is in; null: the rings'
  };
  int post(const Write& write) { return post_all({&write, 1}); }
  // Several at once, `most_at_once` at most; of some of them where it fails.
  int post_all(std::span<const Write> writes);
  static constexpr std::size_t most_at_once = 16;
  // Reads from the peer's `address`, which `key` names, into `to`, which is in `region`; completes with `id`, where
  // that is not 0. `then`: what is posted with it and follows it. Returns 0 or an errno.
  int post_read(std::uint64_t address, std::uint32_t key, std::byte* to, std::size_t bytes,
                const verbs::MemoryRegion& region, std::uint64_t id, const Write* then = nullptr);
  // The one that lasts as long as the shared buffer that `memory` is in; null where it is in none (see BufferRegions).
  SharedRegion region_of_buffer(const iovec& memory) const;
  // The region that `memory` is in: a shared buffer's (see BufferRegions), what is kept of messages before (see
  // UserRegions), or its own. Null, with errno set, where it cannot be registered.
  SharedRegion register_memory(const iovec& memory, int access) const;
  // The same of a GPU's memory (see GpuDirect), for one message.
  SharedRegion register_device_memory(const iovec& memory, int gpu, int access) const;
  // What cannot be registered and why, with the limit and what to do.
  std::string refused_text(std::size_t bytes, int error) const;
  // From now on the HCA neither reads nor writes any memory for it, and what is under way fails.
  void stop();
  // A request's bytes at most for which packets fit all queues on their way back.
  std::size_t max_read_bytes() const;
  std::size_t inline_bytes() const { return inline_bytes_; }
  // Returns an errno.
  int post_receives(std::uint32_t count);

  std::size_t poll_sends(std::span<verbs::WorkCompletion> completions) { return poll(*sends_, completions); }
  std::size_t poll_receives(std::span<verbs::WorkCompletion> completions) { return poll(*receives_, completions); }
  // What makes `fd` readable: solicited receives, these and signaled sends, both of all kinds.
  enum class Wake { solicited, sends, any };
  // Makes it so once.
  void arm(Wake wake);
  // Takes what made `fd` readable; returns whether anything did.
  bool take_events();
  int fd() const { return channel_->fd; }

  // What the HCA has told by itself of it, of its port or of the HCA, where nothing more is to be expected of it.
  struct Trouble {
    int error = 0;
    const char* why = "";
  };
  std::optional<Trouble> look_for_trouble(Clock::time_point now) const;
  // When to look though nothing is told; and what is readable when something is.
  std::optional<Clock::time_point> next_trouble() const;
  int events_fd() const { return device_->events().fd(); }

private:
  SharedRegion shared(verbs::MemoryRegion* region) const;
  [[noreturn]] void throw_short(const std::string& what, int error) const;
  void fill(verbs::SendRequest& request, verbs::ScatterEntry& entry, const Write& write) const;
  int post(verbs::SendRequest& request);
  static std::size_t poll(verbs::CompletionQueue& queue, std::span<verbs::WorkCompletion> completions);
  void modify(verbs::QpAttributes& attributes, int mask, const char* what);

  std::shared_ptr<const RdmaDevice> device_;
  const verbs::Library& library_;
  std::shared_ptr<RdmaRings> rings_;
  std::uint64_t epoch_;
  VerbsPointer<verbs::MemoryRegion> region_;
  VerbsPointer<verbs::CompletionChannel> channel_;
  VerbsPointer<verbs::CompletionQueue> sends_;
  VerbsPointer<verbs::CompletionQueue> receives_;
  VerbsPointer<verbs::QueuePair> pair_;
  std::size_t inline_bytes_ = 0;
  std::uint32_t psn_ = 0;
  RdmaEndpoint peer_;
  bool is_armed_for_solicited_ = false;
  bool is_armed_for_receives_ = false;
  bool is_armed_for_sends_ = false;
};

}  // namespace holmes
