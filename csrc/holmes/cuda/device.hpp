// Device: one GPU of this process: its context, its streams and events.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "holmes/cuda/driver.hpp"

namespace holmes::cuda {

// An event of a device's pool; it returns there with the last reference.
using EventPtr = std::shared_ptr<void>;

// Thread-safe.
class Device {
public:
  // The device with this number (as CUDA_VISIBLE_DEVICES counts); kept for the life of the process. Throws UsageError
  // where there is no such device.
  static Device& get(int ordinal);

  int ordinal() const { return ordinal_; }
  // How many thread blocks can have a multiprocessor of their own.
  int multiprocessors() const { return multiprocessors_; }
  // CU_DEVICE_ATTRIBUTE_...; 0 where the driver does not know it.
  int attribute(int number) const;
  EventPtr take_event();
  // An event behind what `stream` of this device has now. Throws UsageError naming `what` where the stream is being
  // captured: what the host does cannot be part of a graph.
  EventPtr mark(Stream stream, const char* what);
  // A stream that does not wait for the legacy default stream.
  Stream make_stream(bool has_high_priority = false);
  // Runs `function` once in a thread of the driver, when `event` is reached; it must not call the driver. Where the GPU
  // has failed it never runs.
  void when_reached(const EventPtr& event, std::function<void()> function);

private:
  friend class CurrentDevice;
  friend void make_current(const Device& device);
  explicit Device(int ordinal);

  int ordinal_;
  int multiprocessors_ = 0;
  Context context_ = nullptr;
  std::mutex mutex_;
  std::vector<Event> free_events_;
  std::vector<Stream> free_streams_;  // of when_reached; each has one function at a time, so that none waits for others
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

// As CurrentDevice, for good: for threads of the library's own.
void make_current(const Device& device);

// Until the end of the scope this thread's calls break no capture that any thread has under way: the driver takes
// questions and allocations for mistakes there. For calls that are no part of what is captured.
class RelaxedCapture {
public:
  RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then this thread's own
};

// As RelaxedCapture, for good: for threads of the library's own.
void relax_captures();

// The id of the capture into a CUDA graph that `stream` takes part in; absent: none, calls run. Throws SystemError
// where a capture is broken.
std::optional<unsigned long long> capture_of(Stream stream);

// The number of the device that has this address; absent for host memory.
std::optional<int> device_of(const void* address);

}  // namespace holmes::cuda
