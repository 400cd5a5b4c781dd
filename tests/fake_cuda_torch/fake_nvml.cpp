// NVML without a GPU, as far as NCCL asks: as many devices as the fake driver has, no NVLink between them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int success = 0, not_supported = 3, not_found = 6;
constexpr int capability_major = 9, p2p_not_supported = 5;

unsigned count() {
  const char* const text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? 8 : static_cast<unsigned>(std::atoi(text));
}

// A device's handle is its number and one.
void* handle_of(unsigned index) { return reinterpret_cast<void*>(std::uintptr_t{index} + 1); }

}  // namespace

extern "C" {
int nvmlInit_v2() { return success; }
int nvmlInit() { return success; }
int nvmlShutdown() { return success; }
const char* nvmlErrorString(int status) { return status == not_found ? "not found" : "not supported"; }
int nvmlDeviceGetCount_v2(unsigned* found) {
  *found = count();
  return success;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  *device = handle_of(index);
  return index < count() ? success : not_found;
}
// As cudaDeviceGetPCIBusId of the fake runtime names them.
int nvmlDeviceGetHandleByPciBusId(const char* bus, void** device) {
  unsigned domain = 0, index = 0;
  if (std::sscanf(bus, "%x:%x:", &domain, &index) != 2 || index >= count()) return not_found;
  *device = handle_of(index);
  return success;
}
int nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(device) - 1);
  return success;
}
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = capability_major;
  *minor = 0;
  return success;
}
int nvmlDeviceGetP2PStatus(void*, void*, int, int* status) {
  *status = p2p_not_supported;
  return success;
}
int nvmlDeviceGetNvLinkState(void*, unsigned, int*) { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo(void*, unsigned, void*) { return not_supported; }
int nvmlDeviceGetNvLinkCapability(void*, unsigned, int, unsigned*) { return not_supported; }
int nvmlDeviceGetFieldValues(void*, int, void*) { return not_supported; }
int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return not_supported; }
int nvmlSystemGetConfComputeState(void*) { return not_supported; }
}
