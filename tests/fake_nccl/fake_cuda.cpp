// A CUDA driver without a GPU, for tests: "device" memory is host memory, every stream is a thread that works through
// its queue in order, events are points in such queues. Only what Holmes and the fake NCCL call.
#include "fake_cuda.hpp"

#include <algorithm>
#include <array>
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
#include <vector>

namespace {

constexpr int success = 0, invalid_value = 1, not_ready = 600, capture_unjoined = 904, capture_isolation = 905;
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

class Queue;
using Task = std::function<void()>;

// What was put on capturing streams, in that order; a launch runs it in the launching stream.
struct Graph {
  unsigned long long id = 0;
  Queue* origin = nullptr;
  std::vector<Queue*> members;  // besides the origin
  std::vector<Task> tasks;
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Point> point;  // of the last record; null: never recorded, which counts as reached
  // Of a record in a capture:
  std::shared_ptr<Graph> graph;
  Queue* queue = nullptr;
  std::size_t position = 0;  // how much its stream had then
};

class Queue {
public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }
  void push(Task task) {
    std::lock_guard lock(mutex_);
    if (capture) {
      capture->tasks.push_back(std::move(task));
      ++captured;
      return;
    }
    ++unfinished_;
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  std::shared_ptr<Graph> capture;            // a capture is one thread's
  std::size_t captured = 0, waited_for = 0;  // in the capture: how much there is, how much of it the origin waits for

  bool is_idle() {
    std::lock_guard lock(mutex_);
    return unfinished_ == 0;
  }

private:
  void run() {
    for (;;) {
      Task task;
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
  std::deque<Task> tasks_;
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
bool fake_cuda_is_capturing(void* stream) { return queue_of(stream).capture != nullptr; }
int fake_cuda_device() { return current_device(); }

namespace {
std::mutex kernels_mutex;
std::map<int, std::map<const void*, int>>& kernels() {  // that run: device -> owner -> how many
  static auto* map = new std::map<int, std::map<const void*, int>>();
  return *map;
}
std::size_t most_owners = 0;
}  // namespace

void fake_cuda_begin_kernel(int device, const void* owner) {
  std::lock_guard lock(kernels_mutex);
  auto& running = kernels()[device];
  ++running[owner];
  most_owners = std::max(most_owners, running.size());
}
void fake_cuda_end_kernel(int device, const void* owner) {
  std::lock_guard lock(kernels_mutex);
  auto& running = kernels()[device];
  if (--running[owner] == 0) running.erase(owner);
}

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
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void**, const void**, std::size_t*) {
  const auto graph = queue_of(stream).capture;
  *status = graph ? 1 : 0;
  if (graph && id != nullptr) *id = graph->id;
  return success;
}
int cuStreamBeginCapture_v2(void* stream, int) {
  static std::atomic<unsigned long long> last_id{0};
  Queue& queue = queue_of(stream);
  queue.capture = std::make_shared<Graph>();
  queue.capture->id = ++last_id;
  queue.capture->origin = &queue;
  return success;
}
int cuStreamEndCapture(void* stream, void** graph) {
  Queue& queue = queue_of(stream);
  const auto made = queue.capture;
  bool is_joined = true;
  for (Queue* member : made->members) {
    is_joined = is_joined && member->waited_for >= member->captured;
    member->capture = nullptr;
    member->captured = member->waited_for = 0;
  }
  queue.capture = nullptr;
  *graph = is_joined ? new std::shared_ptr<Graph>(made) : nullptr;
  return is_joined ? success : capture_unjoined;
}
// A graph is its own executable here.
int cuGraphLaunch(void* graph, void* stream) {
  for (const Task& task : (*static_cast<std::shared_ptr<Graph>*>(graph))->tasks) queue_of(stream).push(task);
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
  auto* recorded = static_cast<Event*>(event);
  Queue& queue = queue_of(stream);
  std::lock_guard lock(recorded->mutex);
  recorded->point = point;
  recorded->graph = queue.capture;
  recorded->queue = &queue;
  recorded->position = queue.captured;
  if (!queue.capture) queue.push([point] { point->reach(); });
  return success;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  auto* waited = static_cast<Event*>(event);
  Queue& queue = queue_of(stream);
  std::lock_guard lock(waited->mutex);
  if (!waited->point) return success;
  if (!waited->graph) {
    // A capture cannot wait for what runs outside of it.
    if (queue.capture) return capture_isolation;
    queue.push([point = waited->point] { point->wait(); });
    return success;
  }
  if (!queue.capture) {
    if (!waited->queue->capture) return capture_isolation;  // that capture has ended
    queue.capture = waited->graph;
    queue.captured = queue.waited_for = 0;
    waited->graph->members.push_back(&queue);
  }
  if (queue.capture != waited->graph) return capture_isolation;
  // Through other members too: whoever waits for them waits for what they wait for. Close enough for tests.
  waited->queue->waited_for = std::max(waited->queue->waited_for, waited->position);
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
// For tests: how many owners' kernels ever ran side by side on one device.
int fake_cuda_most_owners() {
  std::lock_guard lock(kernels_mutex);
  return static_cast<int>(most_owners);
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
  *name = status == success             ? "CUDA_SUCCESS"
          : status == not_ready         ? "CUDA_ERROR_NOT_READY"
          : status == 2                 ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == 700               ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : status == capture_unjoined  ? "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
          : status == capture_isolation ? "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
                                        : "CUDA_ERROR_INVALID_VALUE";
  return success;
}
}
