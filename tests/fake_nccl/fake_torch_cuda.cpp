// Gives a torch without CUDA the device type "cuda" on the fake CUDA driver: devices, streams and events as torch's own
// code asks for them, and the few operations that the tests of the c10d backend need. Import it after torch.
#include <ATen/ATen.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_cuda.hpp"

extern "C" {
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuThreadExchangeStreamCaptureMode(int* mode);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamSynchronize(void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventRecord(void* event, void* stream);
int cuEventQuery(void* event);
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes);
}

namespace {

constexpr c10::DeviceIndex device_count = 8;

struct Current {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, device_count> streams{};  // a CUstream as a number; 0: the default stream
};
thread_local Current current;

void* native(const c10::Stream& stream) { return reinterpret_cast<void*>(stream.id()); }

void use_device(c10::DeviceIndex device) {
  current.device = device;
  void* context = nullptr;
  cuDevicePrimaryCtxRetain(&context, device);
  cuCtxSetCurrent(context);
}

c10::Stream make_stream(c10::Device device) {
  void* stream = nullptr;
  cuStreamCreate(&stream, 1);
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
}

// As torch's allocator: a block belongs to the stream that was current when it was made, and may have another owner as
// soon as it is freed: what runs on its stream from then on overwrites it. It is poisoned there, and never used again.
class Allocator {
public:
  void* allocate(std::size_t bytes, c10::DeviceIndex device) {
    unsigned long long address = 0;
    int mode = 2;  // relaxed: memory may be had in a capture
    cuThreadExchangeStreamCaptureMode(&mode);
    TORCH_CHECK(cuMemAlloc_v2(&address, std::max<std::size_t>(bytes, 1)) == 0, "fake memory");
    cuThreadExchangeStreamCaptureMode(&mode);
    const std::lock_guard lock(mutex_);
    blocks_[address] = {bytes, device, {current.streams[static_cast<std::size_t>(device)]}};
    used_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
    return reinterpret_cast<void*>(address);
  }

  void free(void* memory) {
    const FakeCall call("torch_allocator");
    std::unique_lock lock(mutex_);
    const Block block = blocks_.extract(reinterpret_cast<unsigned long long>(memory)).mapped();
    used_bytes_ -= block.bytes;
    lock.unlock();
    void* before = nullptr;
    void* context = nullptr;
    cuCtxGetCurrent(&before);
    cuDevicePrimaryCtxRetain(&context, block.device);
    cuCtxSetCurrent(context);
    const auto stream = [&](std::size_t i) { return reinterpret_cast<void*>(block.streams[i]); };
    for (std::size_t i = 1; i < block.streams.size(); ++i) {
      void* event = nullptr;
      cuEventCreate(&event, 0);
      cuEventRecord(event, stream(i));
      cuStreamWaitEvent(stream(0), event, 0);
      cuEventDestroy_v2(event);
    }
    fake_cuda_access(stream(0), memory, block.bytes, true, "another use of freed memory");
    fake_cuda_enqueue(stream(0), [memory, bytes = block.bytes] { std::memset(memory, 0xee, bytes); });
    cuCtxSetCurrent(before);
  }

  void record_stream(const void* memory, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<unsigned long long>(memory));
    if (found != blocks_.end()) found->second.streams.push_back(stream.id());
  }

  // The most that was in use at once since the last question.
  std::size_t take_peak_bytes() {
    const std::lock_guard lock(mutex_);
    return std::exchange(peak_bytes_, used_bytes_);
  }

private:
  struct Block {
    std::size_t bytes;
    c10::DeviceIndex device;
    std::vector<c10::StreamId> streams;  // the first one is its own
  };
  std::mutex mutex_;
  std::map<unsigned long long, Block> blocks_;
  std::size_t used_bytes_ = 0, peak_bytes_ = 0;
};

Allocator& allocator() {
  static auto* const made = new Allocator();  // tensors may outlive static destruction
  return *made;
}

// As the methods of the interface say.
struct FakeCudaGuard final : c10::impl::DeviceGuardImplInterface {
  FakeCudaGuard() = default;
  explicit FakeCudaGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    use_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current.device}; }
  void setDevice(c10::Device device) const override { use_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { use_device(device.index()); }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? device.index() : current.device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, index),
                       current.streams[static_cast<std::size_t>(index)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return make_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current.streams[static_cast<std::size_t>(stream.device_index())] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) cuEventCreate(event, 0);
    cuEventRecord(*event, native(stream));
  }
  void block(void* event, const c10::Stream& stream) const override { cuStreamWaitEvent(native(stream), event, 0); }
  bool queryEvent(void* event) const override { return cuEventQuery(event) == 0; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { cuEventDestroy_v2(event); }
  void synchronizeStream(const c10::Stream& stream) const override { cuStreamSynchronize(native(stream)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().record_stream(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, c10::DeviceIndex device) {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  const c10::DeviceIndex before = current.device;
  use_device(device);
  void* const memory = allocator().allocate(bytes, device);
  use_device(before);
  const c10::Device place(c10::kCUDA, device);
  return at::for_blob(memory, sizes)
      .deleter([](void* freed) { allocator().free(freed); })
      .options(at::TensorOptions().dtype(type).device(place))
      .target_device(place)
      .make_tensor();
}

at::Tensor empty_memory_format(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat>) {
  const bool is_named = device && device->has_index();
  return empty(sizes, type.value_or(at::kFloat), is_named ? device->index() : current.device);
}

// The same memory, as torch's CPU code takes it.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.scalar_type()))
      .make_tensor();
}

// After what the current stream has, and done on return.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  for (const at::Tensor* tensor : {static_cast<const at::Tensor*>(&self), &source})
    if (tensor->is_cuda()) cuStreamSynchronize(native(FakeCudaGuard().getStream(tensor->device())));
  at::Tensor target = as_cpu(self);
  target.copy_(as_cpu(source));
  return self;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  allocator().record_stream(tensor.storage().data(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("copy_", copy);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
}

}  // namespace

PYBIND11_MODULE(fake_torch_cuda, m) {
  m.def("tensor", [](const at::Tensor& values, int device) {
    at::Tensor made = empty(values.sizes(), values.scalar_type(), static_cast<c10::DeviceIndex>(device));
    as_cpu(made).copy_(values);
    return made;
  });
  m.def("values", [](const at::Tensor& tensor) { return as_cpu(tensor).clone(); });  // without waiting for anything
  m.def("take_peak_bytes", [] { return allocator().take_peak_bytes(); });
  m.def("use_device", [](int device) { use_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("current_stream", [](int device) { return current.streams[static_cast<std::size_t>(device)]; });
  m.def("set_stream",
        [](int device, std::int64_t stream) { current.streams[static_cast<std::size_t>(device)] = stream; });
}
