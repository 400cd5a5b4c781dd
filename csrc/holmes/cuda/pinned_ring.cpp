#include "holmes/cuda/pinned_ring.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes::cuda {
namespace {

constexpr std::size_t page_bytes = 4096;
constexpr unsigned usable_by_all_contexts = 1;  // CU_MEMHOSTALLOC_PORTABLE
constexpr auto end_poll_interval = std::chrono::milliseconds(5);

Address address_of(const Buffer& buffer, std::size_t offset) {
  return reinterpret_cast<Address>(buffer.begin() + offset);
}

}  // namespace

PinnedRing::Resources::~Resources() {
  // What fails here (the driver is shutting down) has nobody to be told.
  const Driver& cuda = driver();
  try {
    const CurrentDevice current(device);
    const RelaxedCapture no_part_of_any_capture;
    if (copies != nullptr) cuda.stream_destroy(copies);
    if (notices != nullptr) cuda.stream_destroy(notices);
    lasting.reset();
    if (memory != nullptr) cuda.host_memory_free(memory);
  } catch (const HolmesError&) {
  }
}

Status PinnedRing::Resources::state() const {
  const CurrentDevice current(device);
  const RelaxedCapture no_part_of_any_capture;
  return driver().stream_query(copies);
}

PinnedRing::PinnedRing(Device& device, std::size_t ring_bytes, std::function<void()> wake)
    : device_(device),
      slot_bytes_(std::max((ring_bytes / slot_count + page_bytes - 1) / page_bytes, std::size_t{1}) * page_bytes),
      resources_(std::make_unique<Resources>(device)) {
  const Driver& cuda = driver();
  const CurrentDevice current(device);
  const RelaxedCapture no_part_of_any_capture;
  resources_->progress->wake = std::move(wake);
  resources_->copies = device.make_stream();
  resources_->notices = device.make_stream();
  const Status status =
      cuda.host_memory_allocate(&resources_->memory, slot_count * slot_bytes_, usable_by_all_contexts);
  if (status != success)
    throw SystemError("cannot allocate " + std::to_string(slot_count * slot_bytes_) +
                      " bytes of page-locked memory for a GPU's messages: " + cuda.describe(status) +
                      "; lower HOLMES_PINNED_RING_BYTES, or free memory of this host");
  resources_->lasting.emplace(resources_->memory, slot_count * slot_bytes_);
  for (std::size_t slot = 0; slot < slot_count; ++slot) give_back(static_cast<int>(slot));
}

PinnedRing::~PinnedRing() {
  collect();
  if (resources_->is_idle()) return;
  // Copies still read or write the buffers: they end later (or the GPU has failed), and nobody here waits for that.
  std::thread([left = std::move(resources_)]() mutable {
    Status state = success;
    try {
      while ((state = left->state()) == not_ready) std::this_thread::sleep_for(end_poll_interval);
    } catch (const HolmesError&) {
      state = not_ready;
    }
    // The driver is shutting down: a copy may still run, so what it uses stays.
    if (state != success) static_cast<void>(left.release());
  }).detach();
}

int PinnedRing::take_slot() {
  --free_slots_;
  return slots_[std::exchange(first_free_slot_, (first_free_slot_ + 1) % slot_count)];
}

std::byte* PinnedRing::memory(int slot) const {
  return static_cast<std::byte*>(resources_->memory) + static_cast<std::size_t>(slot) * slot_bytes_;
}

void PinnedRing::put_behind(const EventPtr& event) {
  const Driver& cuda = driver();
  const CurrentDevice current(device_);
  cuda.check(cuda.stream_wait_event(resources_->copies, event.get(), 0), "let a copy wait for a stream");
}

PinnedRing::Ticket PinnedRing::copy_to_host(int slot, const Buffer& buffer, std::size_t offset, std::size_t bytes) {
  const Driver& cuda = driver();
  const CurrentDevice current(device_);
  cuda.check(cuda.copy_to_host(memory(slot), address_of(buffer, offset), bytes, resources_->copies),
             "copy from the GPU");
  return add(buffer, -1);
}

PinnedRing::Ticket PinnedRing::copy_to_device(int slot, const Buffer& buffer, std::size_t offset, std::size_t bytes) {
  const Driver& cuda = driver();
  const CurrentDevice current(device_);
  cuda.check(cuda.copy_to_device(address_of(buffer, offset), memory(slot), bytes, resources_->copies),
             "copy to the GPU");
  return add(buffer, slot);
}

// A copy was put on the stream: asks to be told of its end.
PinnedRing::Ticket PinnedRing::add(const Buffer& buffer, int slot_to_free) {
  const Driver& cuda = driver();
  const EventPtr end = device_.take_event();
  // Held first: where the following fails, the copy runs all the same.
  const Ticket ticket = ++resources_->started;
  resources_->running.push_back({ticket, buffer.owner, slot_to_free});
  cuda.check(cuda.event_record(end.get(), resources_->copies), "record a CUDA event");
  cuda.check(cuda.stream_wait_event(resources_->notices, end.get(), 0), "let a stream wait for a copy");
  auto argument = std::make_unique<std::shared_ptr<Progress>>(resources_->progress);
  const auto tell = [](void* told) {
    const std::unique_ptr<std::shared_ptr<Progress>> progress(static_cast<std::shared_ptr<Progress>*>(told));
    (*progress)->ended.fetch_add(1, std::memory_order_release);
    (*progress)->wake();
  };
  cuda.check(cuda.launch_host_function(resources_->notices, tell, argument.get()), "ask for the end of a copy");
  static_cast<void>(argument.release());  // the function's now
  return ticket;
}

bool PinnedRing::has_ended(Ticket ticket) const {
  return resources_->progress->ended.load(std::memory_order_acquire) >= ticket;
}

bool PinnedRing::collect() {
  bool any = false;
  while (!resources_->running.empty() && has_ended(resources_->running.front().ticket)) {
    const Copy copy = std::move(resources_->running.front());
    resources_->running.pop_front();
    if (copy.slot_to_free >= 0) give_back(copy.slot_to_free);
    any = true;
  }
  return any;
}

std::string PinnedRing::error_text() const {
  const Driver& cuda = driver();
  const CurrentDevice current(device_);
  const RelaxedCapture no_part_of_any_capture;
  const Status status = cuda.stream_query(resources_->copies);
  return status == success || status == not_ready ? "" : ", the GPU reports " + cuda.describe(status);
}

}  // namespace holmes::cuda
