// A CUDA driver without a GPU, for tests: "device" memory is host memory, every stream is a thread that works through
// its queue in order, events are points in such queues. Only what Holmes and the fake NCCL call.
#include "fake_cuda.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {

constexpr int success = 0, invalid_value = 1, not_ready = 600;
constexpr int device_count = 8;

struct Point {  // reached once all that was queued before it is done
  std::atomic<bool> reached{false};
  std::mutex mutex;
  std::condition_variable changed;
  void reach() {
    std::lock_guard lock(mutex);
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached.load(); });
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Point> point;  // of the last record; null: never recorded, which counts as reached
};

class Queue {
public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }
  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    ++unfinished_;
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
      task = nullptr;
      std::lock_guard lock(mutex_);
      --unfinished_;
    }
  }
  std::mutex mutex_;
  int unfinished_ = 0;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

std::mutex memory_mutex;
std::map<unsigned long long, std::pair<std::size_t, int>>& memory() {  // address -> bytes, device
  static auto* map = new std::map<unsigned long long, std::pair<std::size_t, int>>();
  return *map;
}

thread_local void* current_context = nullptr;
int current_device() {
  return current_context == nullptr ? 0 : static_cast<int>(reinterpret_cast<long>(current_context)) - 1;
}

// Never freed: tests are short, and a stream's thread must not outlive its queue.
Queue& queue_of(void* stream) {
  fake_cuda_check_call();
  static auto* defaults = new std::array<Queue, device_count>();
  return stream == nullptr ? (*defaults)[static_cast<std::size_t>(current_device())] : *static_cast<Queue*>(stream);
}

}  // namespace

bool fake_cuda_has_context() { return current_context != nullptr; }
bool fake_cuda_is_allocated(unsigned long long address, std::size_t bytes) {
  std::lock_guard lock(memory_mutex);
  auto after = memory().upper_bound(address);
  if (after == memory().begin()) return false;
  const auto& [begin, block] = *std::prev(after);
  return address + bytes <= begin + block.first;
}

void fake_cuda_enqueue(void* stream, std::function<void()> task) { queue_of(stream).push(std::move(task)); }

extern "C" {

int cuInit(unsigned) { return success; }
int cuDeviceGetCount(int* count) {
  *count = device_count;
  return success;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < 0 || ordinal >= device_count ? invalid_value : success;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<long>(device) + 1);
  return success;
}
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return success;
}
int cuCtxSetCurrent(void* context) {
  current_context = context;
  return success;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = new Queue();
  return success;
}
int cuStreamDestroy_v2(void*) { return success; }
int cuStreamQuery(void* stream) { return queue_of(stream).is_idle() ? success : not_ready; }
int cuStreamIsCapturing(void*, int* status) {
  *status = 0;
  return success;
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event();
  return success;
}
int cuEventDestroy_v2(void* event) {
  delete static_cast<Event*>(event);
  return success;
}
int cuEventRecord(void* event, void* stream) {
  auto point = std::make_shared<Point>();
  {
    auto* recorded = static_cast<Event*>(event);
    std::lock_guard lock(recorded->mutex);
    recorded->point = point;
  }
  queue_of(stream).push([point] { point->reach(); });
  return success;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  auto* waited = static_cast<Event*>(event);
  std::lock_guard lock(waited->mutex);
  if (waited->point) queue_of(stream).push([point = waited->point] { point->wait(); });
  return success;
}
int cuEventQuery(void* event) {
  auto* asked = static_cast<Event*>(event);
  std::lock_guard lock(asked->mutex);
  return !asked->point || asked->point->reached ? success : not_ready;
}
int cuStreamSynchronize(void* stream) {
  auto point = std::make_shared<Point>();
  queue_of(stream).push([point] { point->reach(); });
  point->wait();
  return success;
}
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  void* block = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (block == nullptr) return 2;
  *address = reinterpret_cast<unsigned long long>(block);
  std::lock_guard lock(memory_mutex);
  memory()[*address] = {bytes, current_device()};
  return success;
}
int cuMemFree_v2(unsigned long long address) {
  std::lock_guard lock(memory_mutex);
  if (memory().erase(address) == 0) return invalid_value;
  std::free(reinterpret_cast<void*>(address));
  return success;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t bytes, void* stream) {
  queue_of(stream).push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return success;
}
// For tests: a stream that is busy for a while.
int fake_cuda_busy(void* stream, int milliseconds) {
  queue_of(stream).push([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  return success;
}
int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
  std::lock_guard lock(memory_mutex);
  auto after = memory().upper_bound(address);
  if (after == memory().begin()) return invalid_value;
  const auto& [begin, block] = *std::prev(after);
  if (address >= begin + std::max<std::size_t>(block.first, 1)) return invalid_value;
  if (attribute == 2) *static_cast<unsigned*>(value) = 2;
  if (attribute == 9) *static_cast<int*>(value) = block.second;
  return success;
}
int cuGetErrorName(int status, const char** name) {
  *name = status == success     ? "CUDA_SUCCESS"
          : status == not_ready ? "CUDA_ERROR_NOT_READY"
          : status == 2         ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == 700       ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                : "CUDA_ERROR_INVALID_VALUE";
  return success;
}
}
