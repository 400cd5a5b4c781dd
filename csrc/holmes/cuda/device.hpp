// Device: one GPU of this process: its context, its events, and the order in which NCCL operations are put on it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "holmes/cuda/driver.hpp"

namespace holmes::cuda {

// An event of a device's pool; it returns there with the last reference.
using EventPtr = std::shared_ptr<void>;

// Thread-safe, but for what `issue` protects.
class Device {
public:
  // The device with this number (as CUDA_VISIBLE_DEVICES counts); kept for the life of the process. Throws UsageError
  // where there is no such device.
  static Device& get(int ordinal);

  int ordinal() const { return ordinal_; }
  EventPtr take_event();
  // An event behind what `stream` of this device has now. Throws UsageError naming `what` where the stream is being
  // captured: what the host does cannot be part of a graph.
  EventPtr mark(Stream stream, const char* what);
  // A stream that does not wait for the legacy default stream.
  Stream make_stream();

  // Held while operations are put on the device: NCCL wants them from one thread at a time, and communicators of
  // several NCCL images must see one order.
  std::timed_mutex issue;
  // The last operation that was put on the device. Protected by `issue`.
  struct Last {
    const void* library = nullptr;  // the NCCL it belongs to
    Stream stream = nullptr;        // where it runs
    EventPtr end;                   // behind it; null: there was none
    unsigned long long capture_id = 0;
  };
  Last last;
  Last last_captured;  // into a CUDA graph; counts only for the capture with its id

private:
  friend class CurrentDevice;
  explicit Device(int ordinal);

  int ordinal_;
  Context context_ = nullptr;
  std::mutex mutex_;
  std::vector<Event> free_events_;
};

// Makes the device's context this thread's, until the end of the scope.
class CurrentDevice {
public:
  explicit CurrentDevice(const Device& device);
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

private:
  Context previous_ = nullptr;
  bool changed_ = false;
};

// The id of the capture into a CUDA graph that `stream` takes part in; absent: none, calls run. Throws SystemError
// where a capture is broken.
std::optional<unsigned long long> capture_of(Stream stream);

// The number of the device that has this address; absent for host memory.
std::optional<int> device_of(const void* address);

}  // namespace holmes::cuda
