#include "holmes/cuda/device.hpp"

#include <map>

#include "holmes/core/error.hpp"

namespace holmes::cuda {
namespace {

constexpr unsigned stream_non_blocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned event_without_timing = 2;   // CU_EVENT_DISABLE_TIMING
constexpr int memory_type_attribute = 2;       // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int ordinal_attribute = 9;           // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int multiprocessors_attribute = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr unsigned device_memory = 2;          // CU_MEMORYTYPE_DEVICE

}  // namespace

Device& Device::get(int ordinal) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<Device>>();  // never destroyed
  std::lock_guard lock(mutex);
  auto& device = (*devices)[ordinal];
  if (!device) device.reset(new Device(ordinal));
  return *device;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  const Driver& cuda = driver();
  int count = 0;
  cuda.check(cuda.device_get_count(&count), "count the GPUs");
  if (ordinal < 0 || ordinal >= count)
    throw UsageError("device " + std::to_string(ordinal) + " does not exist; this process sees GPUs 0 to " +
                     std::to_string(count - 1));
  int handle = 0;
  cuda.check(cuda.device_get(&handle, ordinal), "open the GPU");
  cuda.check(cuda.device_get_attribute(&multiprocessors_, multiprocessors_attribute, handle), "ask for the GPU's size");
  cuda.check(cuda.primary_context_retain(&context_, handle), "open the GPU's context");
}

int Device::attribute(int number) const {
  const Driver& cuda = driver();
  int handle = 0;
  int value = 0;
  cuda.check(cuda.device_get(&handle, ordinal_), "open the GPU");
  return cuda.device_get_attribute(&value, number, handle) == success ? value : 0;
}

EventPtr Device::take_event() {
  const Driver& cuda = driver();
  Event event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      event = free_events_.back();
      free_events_.pop_back();
    }
  }
  if (event == nullptr) cuda.check(cuda.event_create(&event, event_without_timing), "create a CUDA event");
  return {event, [this](Event used) {
            std::lock_guard lock(mutex_);
            free_events_.push_back(used);
          }};
}

EventPtr Device::mark(Stream stream, const char* what) {
  const Driver& cuda = driver();
  const CurrentDevice current(*this);
  if (capture_of(stream))
    throw UsageError(std::string(what) +
                     ": the stream is being captured into a CUDA graph, which cannot hold what sockets do; call it "
                     "outside of the capture, or use an NCCL communicator");
  EventPtr event = take_event();
  cuda.check(cuda.event_record(event.get(), stream), "record a CUDA event");
  return event;
}

Stream Device::make_stream(bool has_high_priority) {
  const Driver& cuda = driver();
  Stream stream = nullptr;
  int least = 0, greatest = 0;  // numbers fall as priorities rise
  if (has_high_priority)
    cuda.check(cuda.stream_priority_range(&least, &greatest), "ask for the priorities of CUDA streams");
  cuda.check(cuda.stream_create(&stream, stream_non_blocking, greatest), "create a CUDA stream");
  return stream;
}

void Device::when_reached(const EventPtr& event, std::function<void()> function) {
  struct Call {
    Device& device;
    Stream stream;
    EventPtr event;  // in use until then
    std::function<void()> function;
  };
  const Driver& cuda = driver();
  Stream stream = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!free_streams_.empty()) {
      stream = free_streams_.back();
      free_streams_.pop_back();
    }
  }
  const CurrentDevice current(*this);
  if (stream == nullptr) stream = make_stream();
  auto call = std::make_unique<Call>(*this, stream, event, std::move(function));
  cuda.check(cuda.stream_wait_event(stream, event.get(), 0), "wait for a CUDA event");
  const auto run = [](void* argument) {
    const std::unique_ptr<Call> reached(static_cast<Call*>(argument));
    {
      std::lock_guard lock(reached->device.mutex_);
      reached->device.free_streams_.push_back(reached->stream);
    }
    reached->function();
  };
  cuda.check(cuda.launch_host_function(stream, run, call.get()), "be told of a CUDA event");
  static_cast<void>(call.release());  // its own from here on
}

CurrentDevice::CurrentDevice(const Device& device) {
  const Driver& cuda = driver();
  cuda.check(cuda.context_get_current(&previous_), "ask for the current GPU");
  if (previous_ == device.context_) return;
  cuda.check(cuda.context_set_current(device.context_), "make a GPU the current one");
  changed_ = true;
}

CurrentDevice::~CurrentDevice() {
  if (changed_) driver().context_set_current(previous_);
}

void make_current(const Device& device) {
  const Driver& cuda = driver();
  Context current = nullptr;
  cuda.check(cuda.context_get_current(&current), "ask for the current GPU");
  if (current != device.context_) cuda.check(cuda.context_set_current(device.context_), "make a GPU the current one");
}

void relax_captures() {
  int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  driver().exchange_capture_mode(&mode);
}

RelaxedCapture::RelaxedCapture() { driver().exchange_capture_mode(&mode_); }
RelaxedCapture::~RelaxedCapture() { driver().exchange_capture_mode(&mode_); }

std::optional<unsigned long long> capture_of(Stream stream) {
  const Driver& cuda = driver();
  int status = 0;
  unsigned long long id = 0;
  cuda.check(cuda.stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
             "ask whether a stream is captured");
  if (status == 0) return std::nullopt;  // CU_STREAM_CAPTURE_STATUS_NONE
  return id;
}

std::optional<int> device_of(const void* address) {
  const Driver& cuda = driver();
  const auto at = reinterpret_cast<Address>(address);
  unsigned type = 0;
  int ordinal = 0;
  if (cuda.pointer_get_attribute(&type, memory_type_attribute, at) != success || type != device_memory)
    return std::nullopt;
  cuda.check(cuda.pointer_get_attribute(&ordinal, ordinal_attribute, at), "find the GPU of an address");
  return ordinal;
}

}  // namespace holmes::cuda
