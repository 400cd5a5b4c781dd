#include "shared_tensors.hpp"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/transport/shared_buffer.hpp"

namespace holmes::torch_backend {
namespace {

constexpr std::uint8_t priority = 1;  // torch's own has 0

// Half of the descriptors stay for others: nobody asked for each of these.
std::size_t most_buffers() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur / 2) : 0;
}

struct Buffers {
  std::mutex mutex;
  std::unordered_map<void*, std::unique_ptr<SharedBuffer>> by_data;
  void after_fork_in_child() {}
};

// Tensors outlive static destruction.
Buffers& buffers() { return fork_registry<Buffers>(); }

// The memory of a new buffer; nullptr where there is to be none.
void* make(std::size_t bytes) {
  Buffers& all = buffers();
  {
    const std::lock_guard lock(all.mutex);
    if (all.by_data.size() >= most_buffers()) return nullptr;
  }
  try {
    auto buffer = std::make_unique<SharedBuffer>(bytes);
    void* const data = buffer->data();
    const std::lock_guard lock(all.mutex);
    all.by_data.emplace(data, std::move(buffer));
    return data;
  } catch (const SystemError&) {  // ordinary memory may do
    return nullptr;
  }
}

// Whether it was a buffer's.
bool drop(void* data) {
  Buffers& all = buffers();
  std::unique_ptr<SharedBuffer> buffer;
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_data.find(data);
  if (found == all.by_data.end()) return false;
  buffer = std::move(found->second);
  all.by_data.erase(found);
  return true;
}

class SharingAllocator final : public c10::Allocator {
public:
  explicit SharingAllocator(c10::Allocator& ordinary) : ordinary_(ordinary) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t least = min_bytes.load(std::memory_order_relaxed);
    if (least != 0 && bytes >= least)
      if (void* const data = make(bytes)) return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
    return ordinary_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return ordinary_.raw_deleter() ? &free : nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  std::atomic<std::size_t> min_bytes{0};

private:
  static void free(void* data);

  c10::Allocator& ordinary_;
};

std::mutex turns;
SharingAllocator* sharing = nullptr;  // what was one stays: storages name the allocator that they came from

void SharingAllocator::free(void* data) {
  if (!drop(data)) sharing->ordinary_.raw_deleter()(data);
}

}  // namespace

void share_tensors_from(std::size_t min_bytes) {
  const std::lock_guard lock(turns);
  if (min_bytes != 0) {
    c10::Allocator* const now = c10::GetAllocator(c10::DeviceType::CPU);
    if (now != sharing) sharing = new SharingAllocator(*now);
    c10::SetAllocator(c10::DeviceType::CPU, sharing, priority);
    if (c10::GetAllocator(c10::DeviceType::CPU) != sharing)
      throw UsageError(
          "torch's CPU memory comes from an allocator of another library, which does not let Holmes' take "
          "its place: leave that one out, or make the arrays with holmes_comm.empty");
  }
  if (sharing) sharing->min_bytes = min_bytes;
}

}  // namespace holmes::torch_backend
