#include "holmes/cuda/gpu_direct.hpp"

#include <cerrno>

#include "holmes/core/types.hpp"

namespace holmes::cuda {
namespace {

constexpr int supported_attribute = 116;  // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED
constexpr int flush_attribute = 117;      // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
constexpr int ordering_attribute = 118;   // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
constexpr int dmabuf_attribute = 124;     // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
constexpr int flush_by_host = 1;          // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
constexpr int ordered_for_owner = 100;    // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
constexpr int flush_current_context = 0;  // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
constexpr int flush_for_owner = 100;      // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
constexpr int dmabuf_handle = 1;          // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

bool is_ordered(const Device& device) { return device.attribute(ordering_attribute) >= ordered_for_owner; }

}  // namespace

std::string missing_for_gpu_direct(const Device& device, GpuDirect way) {
  const Driver& cuda = driver();
  const std::string gpu = "GPU " + std::to_string(device.ordinal());
  if (device.attribute(supported_attribute) == 0)
    return gpu +
           " does not say that other devices may reach its memory (GPU_DIRECT_RDMA_SUPPORTED is 0); take a GPU "
           "and a driver that do";
  const bool has_export = cuda.memory_export != nullptr;
  if (way == GpuDirect::dmabuf && (!has_export || device.attribute(dmabuf_attribute) == 0))
    return gpu + " exports no dma-buf (" +
           (has_export ? "DMA_BUF_SUPPORTED is 0" : "the driver has no cuMemGetHandleForAddressRange") +
           "); install the open kernel modules of a current NVIDIA driver, or load nvidia_peermem and say peermem";
  const bool can_flush = cuda.flush_writes != nullptr && (device.attribute(flush_attribute) & flush_by_host) != 0;
  if (!is_ordered(device) && !can_flush)
    return gpu +
           " neither orders what other devices write nor can be made to see it "
           "(GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS is 0); update the NVIDIA driver";
  return "";
}

ExportedMemory export_memory(const Device& device, const void* address, std::size_t bytes) {
  const CurrentDevice current(device);
  const RelaxedCapture no_part_of_any_capture;
  const auto begin = reinterpret_cast<Address>(address);
  const Address first = begin / page_bytes() * page_bytes();
  const Address end = (begin + bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  int fd = -1;
  if (driver().memory_export(&fd, first, end - first, dmabuf_handle, 0) != success) {
    errno = EOPNOTSUPP;
    return {};
  }
  return {UniqueFd(fd), begin - first};
}

void flush_writes(const Device& device) {
  if (is_ordered(device)) return;
  const Driver& cuda = driver();
  const CurrentDevice current(device);
  const RelaxedCapture no_part_of_any_capture;
  cuda.check(cuda.flush_writes(flush_current_context, flush_for_owner), "see what an HCA wrote to the GPU");
}

}  // namespace holmes::cuda
