// Gives a torch without CUDA the device type "cuda" on the fake CUDA driver: devices, streams and events as torch's own
// code asks for them, and the few operations that the tests of the c10d backend need. Import it after torch.
#include <ATen/ATen.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <cstdint>

extern "C" {
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxSetCurrent(void* context);
int cuStreamCreate(void** stream, unsigned flags);
int cuStreamSynchronize(void* stream);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventRecord(void* event, void* stream);
int cuEventQuery(void* event);
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes);
int cuMemFree_v2(unsigned long long address);
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
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type, c10::DeviceIndex device) {
  const std::size_t bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  const c10::DeviceIndex before = current.device;
  use_device(device);
  unsigned long long address = 0;
  TORCH_CHECK(cuMemAlloc_v2(&address, std::max<std::size_t>(bytes, 1)) == 0, "fake memory");
  use_device(before);
  const c10::Device place(c10::kCUDA, device);
  return at::for_blob(reinterpret_cast<void*>(address), sizes)
      .deleter([address](void*) { cuMemFree_v2(address); })
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

void record_stream(at::Tensor&, c10::Stream) {}

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
  m.def("use_device", [](int device) { use_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("current_stream", [](int device) { return current.streams[static_cast<std::size_t>(device)]; });
  m.def("set_stream",
        [](int device, std::int64_t stream) { current.streams[static_cast<std::size_t>(device)] = stream; });
}
