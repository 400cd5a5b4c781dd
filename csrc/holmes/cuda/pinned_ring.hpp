// PinnedRing: page-locked slots through which the copy engine moves a GPU's memory, and the stream of those copies.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "holmes/core/lasting_memory.hpp"
#include "holmes/core/types.hpp"
#include "holmes/cuda/device.hpp"

namespace holmes::cuda {

// No kernel is involved, so nothing is taken from the GPU's multiprocessors. One thread at a time, and its memory is
// all that it ever takes. Copies run in the order they are started. A buffer is held until its copies have ended, also
// where the ring itself ends before them; that never blocks.
class PinnedRing {
public:
  // Numbers the ring's copies from 1 on.
  using Ticket = std::uint64_t;

  // `ring_bytes` are rounded up to whole pages for each slot. `wake` is called after every copy, in a thread of the
  // driver; it must neither block nor call the driver. Throws SystemError where page-locked memory is refused.
  PinnedRing(Device& device, std::size_t ring_bytes, std::function<void()> wake);
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;
  ~PinnedRing();

  Device& device() const { return device_; }
  std::size_t slot_bytes() const { return slot_bytes_; }
  bool has_free_slot() const { return free_slots_ > 0; }
  // Slots that are sent at once, where they lie in one piece: the others are filled meanwhile.
  static constexpr std::size_t slots_at_once() { return slot_count / 2; }
  // The number of a slot that was free, the longest of all, so that those of a message lie in one piece; it is the
  // caller's until it is given back.
  int take_slot();
  void give_back(int slot) { slots_[(first_free_slot_ + free_slots_++) % slot_count] = slot; }
  std::byte* memory(int slot) const;

  // Copies that are started later begin after `event`.
  void put_behind(const EventPtr& event);
  // Starts a copy of `bytes` at `offset` of `buffer` (device memory) to or from the beginning of the slot. A slot that
  // is copied to the device is given back by `collect` once the copy has ended.
  Ticket copy_to_host(int slot, const Buffer& buffer, std::size_t offset, std::size_t bytes);
  Ticket copy_to_device(int slot, const Buffer& buffer, std::size_t offset, std::size_t bytes);
  bool has_ended(Ticket ticket) const;
  // Lets go of the slots and buffers of copies that have ended. Returns whether there were any.
  bool collect();
  // ", the GPU reports ..." where the copies failed; empty where they go on.
  std::string error_text() const;

private:
  // Enough that one slot is filled, one emptied and others wait in between, few enough that slots are large.
  static constexpr std::size_t slot_count = 8;
  struct Copy {
    Ticket ticket;
    std::shared_ptr<void> owner;
    int slot_to_free;  // -1: none
  };
  // What the driver's thread touches: it outlives the ring as long as a copy runs.
  struct Progress {
    std::atomic<Ticket> ended{0};
    std::function<void()> wake;
  };
  // What must stay until the last copy has ended.
  struct Resources {
    explicit Resources(Device& owner) : device(owner) {}
    Resources(const Resources&) = delete;
    Resources& operator=(const Resources&) = delete;
    ~Resources();
    Status state() const;  // of the copies: success, not_ready or what went wrong
    bool is_idle() const { return progress->ended.load(std::memory_order_acquire) == started; }

    Device& device;
    Stream copies = nullptr;
    // Tells of ended copies: on the copies' own stream that would hold up the next one.
    Stream notices = nullptr;
    void* memory = nullptr;
    std::optional<LastingMemory> lasting;  // HCAs know it
    Ticket started = 0;
    std::deque<Copy> running;
    std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  };

  Ticket add(const Buffer& buffer, int slot_to_free);

  Device& device_;
  std::size_t slot_bytes_;
  std::array<int, slot_count> slots_{};  // those that are free, from one on, the longest first
  std::size_t first_free_slot_ = 0;
  std::size_t free_slots_ = 0;
  std::unique_ptr<Resources> resources_;
};

}  // namespace holmes::cuda
