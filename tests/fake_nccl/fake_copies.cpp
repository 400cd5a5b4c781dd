// Page-locked memory, copies to and from it, and host functions of the fake CUDA driver. A copy runs when its stream
// gets to it; until then what it writes is poisoned and what it reads must not change.
//
// An HCA of tests/fake_verbs (HOLMES_VERBS_LIBRARY, where the process has loaded it) is asked, too: the process ends
// where memory is copied to or from that one still uses, and where memory is freed that one has registered.
//
// Of GPUDirect RDMA: memory is exported in whole pages, and what an HCA writes is not there before
// cuFlushGPUDirectRDMAWrites. FAKE_CUDA_GPUDIRECT=none, no_dmabuf, no_flush: what the GPU lacks.
//
// FAKE_CUDA_COPY_US: every such copy takes so long. FAKE_CUDA_FAULT=copy, pinned: copies, page-locked allocations fail.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.hpp"

namespace {

constexpr int success = 0, invalid_value = 1, out_of_memory = 2, deinitialized = 4, illegal_address = 700;
constexpr int poison = 0xee;

struct Block {
  std::size_t bytes;
  int copies;  // that are queued
};
std::mutex pinned_mutex;
std::map<char*, Block>& pinned() {
  static auto* map = new std::map<char*, Block>();
  return *map;
}

thread_local bool in_host_function = false;

bool has_fault(const char* kind) {
  const char* fault = std::getenv("FAKE_CUDA_FAULT");
  return fault != nullptr && std::string(fault) == kind;
}

void take_time() {
  const char* text = std::getenv("FAKE_CUDA_COPY_US");
  if (text != nullptr) std::this_thread::sleep_for(std::chrono::microseconds(std::atoi(text)));
}

// The block that holds these bytes, null where there is none. Under the lock.
Block* find_pinned(const void* begin, std::size_t bytes) {
  auto* address = static_cast<char*>(const_cast<void*>(begin));
  auto after = pinned().upper_bound(address);
  if (after == pinned().begin()) return nullptr;
  auto& [start, block] = *std::prev(after);
  return address + bytes <= start + block.bytes ? &block : nullptr;
}

void count_copy(const void* begin, std::size_t bytes, int change) {
  std::lock_guard lock(pinned_mutex);
  Block* block = find_pinned(begin, bytes);
  if (block == nullptr) fake_cuda_misuse("a copy between a GPU and memory that is not page-locked (any more)");
  block->copies += change;
}

// What the stand-in for libibverbs answers of these bytes; false where there is none. Not under the lock: it asks back.
bool of_verbs(const char* question, const void* begin, std::size_t bytes) {
  const char* const path = std::getenv("HOLMES_VERBS_LIBRARY");
  void* const verbs = path != nullptr ? ::dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : nullptr;
  auto* const ask =
      verbs != nullptr ? reinterpret_cast<int (*)(const void*, std::size_t)>(::dlsym(verbs, question)) : nullptr;
  return ask != nullptr && ask(begin, bytes) != 0;
}

void check_copy(unsigned long long device_address, const void* host, std::size_t bytes) {
  fake_cuda_check_call();
  if (of_verbs("fake_verbs_uses", host, bytes))
    fake_cuda_misuse("page-locked memory is copied to or from while an HCA uses it");
  if (!fake_cuda_has_context()) fake_cuda_misuse("a copy in a thread without a current context");
  if (bytes == 0) fake_cuda_misuse("a copy of nothing");
  if (!fake_cuda_is_allocated(device_address, bytes)) fake_cuda_misuse("a copy beyond the GPU's allocated memory");
  count_copy(host, bytes, 1);
}

void check_alive(unsigned long long device_address, std::size_t bytes) {
  if (!fake_cuda_is_allocated(device_address, bytes))
    fake_cuda_misuse("memory of a GPU was freed while a copy was queued");
}

// What HCAs have written to GPUs' memory and nobody can see yet.
struct UnseenWrite {
  unsigned long long address;
  std::vector<char> bytes;
};
std::mutex unseen_mutex;
std::vector<UnseenWrite>& unseen() {
  static auto* made = new std::vector<UnseenWrite>();
  return *made;
}

bool lacks(const char* what) {
  const char* lacking = std::getenv("FAKE_CUDA_GPUDIRECT");
  return lacking != nullptr && (std::string(lacking) == "none" || std::string(lacking) == what);
}

}  // namespace

int fake_cuda_gpu_direct(int attribute) {
  constexpr int supported = 116, flush_options = 117, dmabuf = 124;
  if (attribute == supported) return lacks("none") ? 0 : 1;
  if (attribute == flush_options) return lacks("no_flush") ? 0 : 1;
  if (attribute == dmabuf) return lacks("no_dmabuf") ? 0 : 1;
  return 0;
}

void fake_cuda_check_free(unsigned long long address, std::size_t bytes) {
  if (bytes > 0 && of_verbs("fake_verbs_is_registered", reinterpret_cast<const void*>(address), bytes))
    fake_cuda_misuse("memory of a GPU was freed that an HCA has");
}

void fake_cuda_forget_writes(unsigned long long address, std::size_t bytes) {
  std::lock_guard lock(unseen_mutex);
  std::erase_if(unseen(), [&](const UnseenWrite& write) {
    return write.address < address + bytes && address < write.address + write.bytes.size();
  });
}

bool fake_cuda_is_pinned(const void* begin, std::size_t bytes) {
  std::lock_guard lock(pinned_mutex);
  return find_pinned(begin, bytes) != nullptr;
}

void fake_cuda_misuse(const char* text) {
  std::fprintf(stderr, "fake CUDA: misuse: %s\n", text);
  std::abort();
}

void fake_cuda_check_call() {
  if (in_host_function) fake_cuda_misuse("the driver was called in a function of cuLaunchHostFunc");
}

extern "C" {

int cuMemHostAlloc(void** memory, std::size_t bytes, unsigned) {
  const FakeCall call("cuMemHostAlloc");
  fake_cuda_check_call();
  if (bytes == 0) return invalid_value;
  if (has_fault("pinned")) return out_of_memory;
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) return out_of_memory;
  std::lock_guard lock(pinned_mutex);
  pinned()[static_cast<char*>(*memory)] = {bytes, 0};
  return success;
}

int cuMemFreeHost(void* memory) {
  const FakeCall call("cuMemFreeHost");
  if (fake_cuda_has_shut_down()) return deinitialized;
  fake_cuda_check_call();
  if (of_verbs("fake_verbs_is_registered", memory, 1)) fake_cuda_misuse("page-locked memory was freed that an HCA has");
  std::lock_guard lock(pinned_mutex);
  const auto found = pinned().find(static_cast<char*>(memory));
  if (found == pinned().end()) return invalid_value;
  if (found->second.copies > 0) fake_cuda_misuse("page-locked memory was freed while a copy was queued");
  pinned().erase(found);
  std::free(memory);
  return success;
}

int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, std::size_t bytes, void* stream) {
  const FakeCall call("cuMemcpyDtoHAsync_v2");
  check_copy(from, to, bytes);
  if (has_fault("copy")) return count_copy(to, bytes, -1), illegal_address;
  std::memset(to, poison, bytes);
  fake_cuda_access(stream, reinterpret_cast<const void*>(from), bytes, false, "a copy to the host");
  fake_cuda_enqueue(stream, [=] {
    take_time();
    check_alive(from, bytes);
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    count_copy(to, bytes, -1);
  });
  return success;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, std::size_t bytes, void* stream) {
  const FakeCall call("cuMemcpyHtoDAsync_v2");
  check_copy(to, from, bytes);
  if (has_fault("copy")) return count_copy(from, bytes, -1), illegal_address;
  const auto* source = static_cast<const char*>(from);
  fake_cuda_access(stream, reinterpret_cast<const void*>(to), bytes, true, "a copy from the host");
  const auto before = std::make_shared<std::vector<char>>(source, source + bytes);
  fake_cuda_enqueue(stream, [=] {
    take_time();
    check_alive(to, bytes);
    if (std::memcmp(before->data(), from, bytes) != 0)
      fake_cuda_misuse("page-locked memory was written while a copy of it was queued");
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    count_copy(from, bytes, -1);
  });
  return success;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  const FakeCall call("cuLaunchHostFunc");
  fake_cuda_enqueue(stream, [=, notice = fake_cuda_notice(stream)] {
    notice();
    in_host_function = true;
    function(argument);
    in_host_function = false;
  });
  return success;
}
int cuMemGetHandleForAddressRange(void* handle, unsigned long long address, std::size_t bytes, int kind,
                                  unsigned long long) {
  const FakeCall call("cuMemGetHandleForAddressRange");
  constexpr std::size_t page = 4096;
  if (lacks("no_dmabuf")) return invalid_value;
  if (kind != 1 || bytes == 0 || address % page != 0 || bytes % page != 0) return invalid_value;
  const int fd = ::memfd_create("fake dma-buf", MFD_CLOEXEC);
  const unsigned long long told[2] = {address, bytes};
  if (fd < 0 || ::write(fd, told, sizeof told) != sizeof told) return out_of_memory;
  *static_cast<int*>(handle) = fd;
  return success;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  const FakeCall call("cuFlushGPUDirectRDMAWrites");
  fake_cuda_check_call();
  if (lacks("no_flush") || target != 0 || (scope != 100 && scope != 200)) return invalid_value;
  if (!fake_cuda_has_context()) fake_cuda_misuse("a flush in a thread without a current context");
  std::lock_guard lock(unseen_mutex);
  for (const UnseenWrite& write : unseen())
    std::memcpy(reinterpret_cast<void*>(write.address), write.bytes.data(), write.bytes.size());
  unseen().clear();
  return success;
}

// For tests/fake_verbs: whether these bytes are a GPU's memory; and what an HCA writes there.
int fake_cuda_owns(const void* begin, std::size_t bytes) {
  return fake_cuda_is_allocated(reinterpret_cast<unsigned long long>(begin), bytes) ? 1 : 0;
}
void fake_cuda_write(void* to, const void* from, std::size_t bytes) {
  const auto* const first = static_cast<const char*>(from);
  std::lock_guard lock(unseen_mutex);
  unseen().push_back({reinterpret_cast<unsigned long long>(to), std::vector<char>(first, first + bytes)});
}
// For tests/fake_verbs: whether these bytes are page-locked memory.
int fake_cuda_holds(const void* begin, std::size_t bytes) { return fake_cuda_is_pinned(begin, bytes) ? 1 : 0; }
// For tests: bytes of page-locked memory that are allocated now.
std::size_t fake_cuda_pinned_bytes() {
  std::lock_guard lock(pinned_mutex);
  std::size_t bytes = 0;
  for (const auto& [address, block] : pinned()) bytes += block.bytes;
  return bytes;
}
}
