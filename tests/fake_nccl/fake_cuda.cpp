// A CUDA driver without a GPU, for tests: "device" memory is host memory, every stream is a thread that works through
// its queue in order, events are points in such queues. Only what Holmes and the fake NCCL call. As the real one it
// refuses questions and allocations that break a capture, and whatever comes after its end at exit.
//
// FAKE_CUDA_MULTIPROCESSORS: how many the devices have (132). FAKE_CUDA_DEVICES: how many devices there are (8).
// FAKE_CUDA_TRACE: a folder for what streams held and when it ran (device_trace.hpp). FAKE_CUDA_DROP: is_dropped.
#include "fake_cuda.hpp"

#include "access_order.hpp"
#include "device_trace.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int success = 0, invalid_value = 1, deinitialized = 4, invalid_handle = 400, not_ready = 600,
              not_supported = 801, capture_unsupported = 900, capture_invalidated = 901, capture_unjoined = 904,
              capture_isolation = 905;
constexpr int capture_global = 0, capture_of_thread = 1;  // modes; 2: relaxed
constexpr int most_devices = 8;

struct Point {  // reached once all that was queued before it is done
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point when{};  // it was
  std::mutex mutex;
  std::condition_variable changed;
  void reach() {
    std::lock_guard lock(mutex);
    when = std::chrono::steady_clock::now();
    reached = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached.load(); });
  }
  const std::uint64_t number = ++last_number;
  static inline std::atomic<std::uint64_t> last_number{0};
};
std::string name_of(const Point& point) { return std::to_string(point.number); }

int device_count() {
  static const char* const text = std::getenv("FAKE_CUDA_DEVICES");
  return text == nullptr ? most_devices : std::clamp(std::atoi(text), 1, most_devices);
}

int current_device();
class Queue;
using Task = std::function<void()>;

using Nodes = std::vector<std::size_t>;  // of a graph, by number

void add_new(Nodes& nodes, const Nodes& more) {
  for (const std::size_t node : more)
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
}

// What was put on capturing streams, and what each part of it runs behind.
struct Graph {
  struct Access {
    const void* begin;
    std::size_t bytes;
    bool writes;
    const char* what;
  };
  struct Node {
    Task task;
    Queue* queue;
    Nodes after;
    std::vector<Access> accesses{};
    const void* stream = nullptr;  // what AccessOrder takes it for: nothing but its edges orders it
  };
  unsigned long long id = 0;
  Queue* origin = nullptr;
  int mode = capture_global;
  std::thread::id thread{};
  std::atomic<bool> is_broken{false};
  std::vector<Queue*> members;  // besides the origin
  std::vector<Node> nodes;
  Nodes order;  // once the capture has ended

  // The worst one for who relies on more than the edges say: what the origin's stream holds as early as it can be, the
  // rest as late.
  void put_in_order() {
    for (const bool of_origin : {true, false})
      for (std::size_t node = 0; node < nodes.size(); ++node)
        if ((nodes[node].queue == origin) == of_origin) visit(node);
  }

  // Whether all of it runs before what comes behind `last`.
  bool ends_with(const Nodes& last) const {
    Nodes reached = last;
    for (std::size_t i = 0; i < reached.size(); ++i) add_new(reached, Nodes(nodes[reached[i]].after));
    return reached.size() == nodes.size();
  }

private:
  void visit(std::size_t node) {
    if (std::find(order.begin(), order.end(), node) != order.end()) return;
    for (const std::size_t earlier : nodes[node].after) visit(earlier);
    order.push_back(node);
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Point> point;  // of the last record; null: never recorded, which counts as reached
  // Of a record in a capture:
  bool is_captured = false;
  std::weak_ptr<Graph> graph;  // its end is nothing to an event
  Nodes last;                  // what its stream had then
  StreamClock clock;
};

AccessOrder& access_order() {
  static auto* made = new AccessOrder();
  return *made;
}

class Queue {
public:
  Queue() : thread_([this] { run(); }) { thread_.detach(); }
  // `what`: its line in the trace, without the number (device_trace.hpp); empty: none.
  void push(Task task, const std::string& what = {}) {
    std::lock_guard lock(mutex_);
    if (!capture && !what.empty() && fake_trace_is_on()) {
      const std::uint64_t number = fake_trace_add(this, current_device(), what);
      task = [number, traced = std::move(task)] {
        traced();
        fake_trace_mark(number, 'e');
      };
    }
    if (capture) {
      static std::atomic<std::uintptr_t> number{0};
      // An odd number is no address of a stream.
      const auto* stream = reinterpret_cast<const void*>(2 * ++number + 1);
      capture->nodes.push_back({std::move(task), this, last, std::exchange(accesses, {}), stream});
      last = {capture->nodes.size() - 1};
      return;
    }
    ++unfinished_;
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

  std::shared_ptr<Graph> capture;       // a capture is one thread's
  Nodes last;                           // in the capture: what the next part of it runs behind
  std::vector<Graph::Access> accesses;  // of that next part

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

// FAKE_CUDA_DROP=wait, record: the driver forgets cuStreamWaitEvent, cuEventRecord; with :N only the Nth of the
// process. Of its callers, not of the other fakes.
bool is_dropped(std::string_view kind, std::string_view name) {
  static const char* const text = std::getenv("FAKE_CUDA_DROP");
  if (text == nullptr || fake_cuda_call() != name) return false;
  const std::string_view wanted(text);
  const auto colon = wanted.find(':');
  if (wanted.substr(0, colon) != kind) return false;
  static std::atomic<int> calls{0};
  const int number = ++calls;
  return colon == std::string_view::npos || number == std::atoi(wanted.substr(colon + 1).data());
}

thread_local int capture_mode = capture_global;  // of this thread
std::atomic<bool> has_shut_down{false};

// The captures that are under way.
struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Graph>> all;
};
Captures& captures() {
  static auto* made = new Captures();
  return *made;
}

// A call that may break captures: of a thread that captures itself, or of any while a capture is a global one.
int unsafe_call() {
  if (has_shut_down) return deinitialized;
  std::lock_guard lock(captures().mutex);
  bool breaks = false;
  for (const auto& graph : captures().all) {
    const bool is_own = graph->thread == std::this_thread::get_id();
    if (capture_mode == capture_global ? graph->mode == capture_global || (is_own && graph->mode == capture_of_thread)
                                       : capture_mode == capture_of_thread && is_own && graph->mode != 2) {
      graph->is_broken = true;
      breaks = true;
    }
  }
  return breaks ? capture_unsupported : success;
}

thread_local void* current_context = nullptr;
int current_device() {
  return current_context == nullptr ? 0 : static_cast<int>(reinterpret_cast<long>(current_context)) - 1;
}

// All that were made, for who waits for a device.
struct Streams {
  std::mutex mutex;
  std::array<std::vector<Queue*>, most_devices> of_devices;
};
Streams& streams() {
  static auto* made = new Streams();
  return *made;
}

// Never freed: tests are short, and a stream's thread must not outlive its queue.
Queue& queue_of(void* stream) {
  fake_cuda_check_call();
  static auto* defaults = new std::array<Queue, most_devices>();
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
std::uint64_t fake_cuda_trace(void* stream, int device, const std::string& what) {
  return fake_trace_add(&queue_of(stream), device, what);
}
void fake_cuda_access(void* stream, const void* begin, std::size_t bytes, bool writes, const char* what) {
  if (bytes > 0 && !fake_cuda_is_allocated(reinterpret_cast<unsigned long long>(begin), bytes))
    fake_cuda_misuse((std::string(what) + " reaches beyond the GPU's allocated memory").c_str());
  Queue& queue = queue_of(stream);
  if (queue.capture)
    queue.accesses.push_back({begin, bytes, writes, what});
  else
    access_order().add(&queue, reinterpret_cast<unsigned long long>(begin), bytes, writes, what);
}
std::function<void()> fake_cuda_notice(void* stream) {
  return [clock = access_order().now(&queue_of(stream))] { access_order().host_waits(clock); };
}
bool fake_cuda_is_capturing(void* stream) { return queue_of(stream).capture != nullptr; }
int fake_cuda_device() { return current_device(); }
bool fake_cuda_has_shut_down() { return has_shut_down; }

namespace {
std::mutex counts_mutex;
std::map<std::string, int>& counts() {
  static auto* map = new std::map<std::string, int>();
  return *map;
}
}  // namespace

void fake_cuda_note(const char* name) {
  std::lock_guard lock(counts_mutex);
  ++counts()[name];
}

namespace {

// Of one thread: how often it called what, and how long it was inside.
struct Calls {
  int depth = 0;
  const char* name = "";  // of the outermost one
  std::chrono::steady_clock::time_point begin{};
  std::chrono::nanoseconds inside{};
  std::mutex mutex;
  std::map<std::string_view, long> counts;  // names are literals; other threads read them
};
std::mutex all_calls_mutex;
std::vector<Calls*>& all_calls() {
  static auto* made = new std::vector<Calls*>();
  return *made;
}
// Never freed: what is destroyed at exit still calls.
Calls& calls() {
  static thread_local auto* const made = [] {
    auto* own = new Calls();
    std::lock_guard lock(all_calls_mutex);
    all_calls().push_back(own);
    return own;
  }();
  return *made;
}

}  // namespace

FakeCall::FakeCall(const char* name) {
  Calls& own = calls();
  if (own.depth++ > 0) return;
  own.begin = std::chrono::steady_clock::now();
  own.name = name;
  std::lock_guard lock(own.mutex);
  ++own.counts[name];
}
const char* fake_cuda_call() { return calls().depth > 0 ? calls().name : ""; }
FakeCall::~FakeCall() {
  Calls& own = calls();
  if (--own.depth == 0) own.inside += std::chrono::steady_clock::now() - own.begin;
}

namespace {

constexpr std::chrono::seconds patience_with_kernels{3};

std::mutex kernels_mutex;
std::condition_variable kernels_changed;
struct Running {
  std::map<const void*, int> owners;  // how many kernels of each
  int used = 0;                       // multiprocessors
  std::deque<std::uint64_t> waiting;  // kernels, in the order in which they begin
  std::uint64_t last = 0;
};
std::map<int, Running>& kernels() {  // by device
  static auto* map = new std::map<int, Running>();
  return *map;
}
std::size_t most_owners = 0;

}  // namespace

int fake_cuda_multiprocessors() {
  const char* text = std::getenv("FAKE_CUDA_MULTIPROCESSORS");
  return text == nullptr ? 132 : std::atoi(text);
}

int fake_cuda_begin_kernel(int device, const void* owner, int least, int most, std::uint64_t trace) {
  fake_trace_mark(trace, 'r');
  std::unique_lock lock(kernels_mutex);
  Running& running = kernels()[device];
  least = std::min(least, fake_cuda_multiprocessors());
  const std::uint64_t own = ++running.last;
  running.waiting.push_back(own);
  const auto fits = [&] {
    return running.waiting.front() == own && running.used + least <= fake_cuda_multiprocessors();
  };
  while (!kernels_changed.wait_for(lock, patience_with_kernels, fits))
    std::fprintf(stderr, "fake CUDA: device %d: a kernel of %d CTAs waits, %zu others hold %d of %d multiprocessors\n",
                 device, least, running.owners.size(), running.used, fake_cuda_multiprocessors());
  running.waiting.pop_front();
  const int taken = std::max(least, std::min(most, fake_cuda_multiprocessors() - running.used));
  running.used += taken;
  ++running.owners[owner];
  most_owners = std::max(most_owners, running.owners.size());
  fake_trace_mark(trace, 'b', taken);
  kernels_changed.notify_all();
  return taken;
}
void fake_cuda_end_kernel(int device, const void* owner, int ctas) {
  std::lock_guard lock(kernels_mutex);
  Running& running = kernels()[device];
  running.used -= ctas;
  if (--running.owners[owner] == 0) running.owners.erase(owner);
  kernels_changed.notify_all();
}

extern "C" {

int cuStreamSynchronize(void* stream);

int cuInit(unsigned) {
  const FakeCall call("cuInit");
  static const int registered = std::atexit([] {
    has_shut_down = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // for who has not noticed
  });
  return registered == 0 ? success : invalid_value;
}
int cuDeviceGetCount(int* count) {
  const FakeCall call("cuDeviceGetCount");
  *count = device_count();
  return success;
}
int cuDeviceGet(int* device, int ordinal) {
  const FakeCall call("cuDeviceGet");
  *device = ordinal;
  return ordinal < 0 || ordinal >= device_count() ? invalid_value : success;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const FakeCall call("cuDeviceGetAttribute");
  constexpr int multiprocessors = 16, last = 144;  // CUDA 13.0's
  if (attribute < 1 || attribute > last) return invalid_value;
  const int direct = fake_cuda_gpu_direct(attribute);
  *value = attribute == multiprocessors ? fake_cuda_multiprocessors() : direct;  // features that it has not are 0
  return success;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  const FakeCall call("cuDevicePrimaryCtxRetain");
  *context = reinterpret_cast<void*>(static_cast<long>(device) + 1);
  return success;
}
// Contexts cost nothing here, so all are there.
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  const FakeCall call("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *is_active = 1;
  return success;
}
int cuCtxGetCurrent(void** context) {
  const FakeCall call("cuCtxGetCurrent");
  *context = current_context;
  return success;
}
int cuCtxSetCurrent(void* context) {
  const FakeCall call("cuCtxSetCurrent");
  current_context = context;
  return success;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  const FakeCall call("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return success;
}
// Streams of all priorities take turns alike here.
int cuStreamCreateWithPriority(void** stream, unsigned, int priority) {
  const FakeCall call("cuStreamCreateWithPriority");
  if (priority < 0) fake_cuda_note("stream of high priority");
  auto* made = new Queue();
  *stream = made;
  std::lock_guard lock(streams().mutex);
  streams().of_devices[static_cast<std::size_t>(current_device())].push_back(made);
  return success;
}
int cuStreamCreate(void** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
int cuCtxSynchronize() {
  const FakeCall call("cuCtxSynchronize");
  if (const int status = unsafe_call(); status != success) return status;
  std::vector<void*> all{nullptr};
  {
    std::lock_guard lock(streams().mutex);
    const auto& made = streams().of_devices[static_cast<std::size_t>(current_device())];
    all.insert(all.end(), made.begin(), made.end());
  }
  for (void* stream : all) {
    const StreamClock clock = access_order().now(&queue_of(stream));
    if (!queue_of(stream).is_idle()) cuStreamSynchronize(stream);
    access_order().host_waits(clock);
  }
  return success;
}
int cuStreamDestroy_v2(void*) { return success; }
int cuStreamQuery(void* stream) {
  const FakeCall call("cuStreamQuery");
  if (const int status = unsafe_call(); status != success) return status;
  const StreamClock clock = access_order().now(&queue_of(stream));
  if (!queue_of(stream).is_idle()) return not_ready;
  access_order().host_waits(clock);
  return success;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const FakeCall call("cuThreadExchangeStreamCaptureMode");
  std::swap(*mode, capture_mode);
  return success;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void**, const void**, std::size_t*) {
  const FakeCall call("cuStreamGetCaptureInfo_v2");
  const auto graph = queue_of(stream).capture;
  *status = graph ? (graph->is_broken ? 2 : 1) : 0;
  if (graph && id != nullptr) *id = graph->id;
  return success;
}
int cuStreamIsCapturing(void* stream, int* status) {
  const FakeCall call("cuStreamIsCapturing");
  return cuStreamGetCaptureInfo_v2(stream, status, nullptr, nullptr, nullptr, nullptr);
}
int cuStreamBeginCapture_v2(void* stream, int mode) {
  const FakeCall call("cuStreamBeginCapture_v2");
  static std::atomic<unsigned long long> last_id{0};
  Queue& queue = queue_of(stream);
  queue.capture = std::make_shared<Graph>();
  queue.capture->id = ++last_id;
  queue.capture->origin = &queue;
  queue.capture->mode = mode;
  queue.capture->thread = std::this_thread::get_id();
  std::lock_guard lock(captures().mutex);
  captures().all.push_back(queue.capture);
  return success;
}
int cuStreamEndCapture(void* stream, void** graph) {
  const FakeCall call("cuStreamEndCapture");
  Queue& queue = queue_of(stream);
  const auto made = queue.capture;
  const bool is_joined = made->ends_with(queue.last);
  for (Queue* member : made->members) {
    member->capture = nullptr;
    member->last.clear();
  }
  queue.capture = nullptr;
  queue.last.clear();
  made->put_in_order();
  std::lock_guard lock(captures().mutex);
  std::erase(captures().all, made);
  if (made->is_broken) return *graph = nullptr, capture_invalidated;
  *graph = is_joined ? new std::shared_ptr<Graph>(made) : nullptr;
  return is_joined ? success : capture_unjoined;
}
// A graph is its own executable here.
int cuGraphLaunch(void* graph, void* stream) {
  const FakeCall call("cuGraphLaunch");
  const Graph& launched = **static_cast<std::shared_ptr<Graph>*>(graph);
  Queue& queue = queue_of(stream);
  // Each part is behind what the stream has and the parts that it was captured behind, and nothing else; what comes
  // next on the stream is behind them all.
  const StreamClock begin = access_order().now(&queue);
  std::vector<StreamClock> ends(launched.nodes.size());
  for (const std::size_t number : launched.order) {
    const Graph::Node& node = launched.nodes[number];
    access_order().wait(node.stream, begin);
    for (const std::size_t earlier : node.after) access_order().wait(node.stream, ends[earlier]);
    for (const auto& [at, bytes, writes, what] : node.accesses)
      access_order().add(node.stream, reinterpret_cast<unsigned long long>(at), bytes, writes, what);
    ends[number] = access_order().now(node.stream);
  }
  for (const StreamClock& end : ends) access_order().wait(&queue, end);
  for (const std::size_t number : launched.order) queue.push(launched.nodes[number].task);
  return success;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  const FakeCall call("cuGraphInstantiateWithFlags");
  *executable = new std::shared_ptr<Graph>(*static_cast<std::shared_ptr<Graph>*>(graph));
  return success;
}
// How many there are; nodes themselves are nobody's to see.
int cuGraphGetNodes(void* graph, void** nodes, std::size_t* count) {
  const FakeCall call("cuGraphGetNodes");
  if (nodes != nullptr) return not_supported;
  *count = (*static_cast<std::shared_ptr<Graph>*>(graph))->nodes.size();
  return success;
}
int cuGraphDestroy(void* graph) {
  const FakeCall call("cuGraphDestroy");
  delete static_cast<std::shared_ptr<Graph>*>(graph);
  return success;
}
int cuEventCreate(void** event, unsigned) {
  const FakeCall call("cuEventCreate");
  *event = new Event();
  return success;
}
int cuEventDestroy_v2(void* event) {
  const FakeCall call("cuEventDestroy_v2");
  delete static_cast<Event*>(event);
  return success;
}
int cuEventRecord(void* event, void* stream) {
  const FakeCall call("cuEventRecord");
  if (is_dropped("record", "cuEventRecord")) return success;
  auto point = std::make_shared<Point>();
  auto* recorded = static_cast<Event*>(event);
  Queue& queue = queue_of(stream);
  std::lock_guard lock(recorded->mutex);
  recorded->point = point;
  recorded->is_captured = queue.capture != nullptr;
  recorded->graph = queue.capture;
  recorded->last = queue.last;
  recorded->clock = access_order().now(&queue);
  if (!queue.capture) queue.push([point] { point->reach(); }, "point " + name_of(*point));
  return success;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const FakeCall call("cuStreamWaitEvent");
  if (is_dropped("wait", "cuStreamWaitEvent")) return success;
  auto* waited = static_cast<Event*>(event);
  Queue& queue = queue_of(stream);
  std::lock_guard lock(waited->mutex);
  if (!waited->point) return success;
  if (!waited->is_captured) {
    // A capture cannot wait for what runs outside of it.
    if (queue.capture) return capture_isolation;
    access_order().wait(&queue, waited->clock);
    queue.push([point = waited->point] { point->wait(); }, "wait " + name_of(*waited->point));
    return success;
  }
  const auto graph = waited->graph.lock();
  if (!graph) return capture_isolation;
  if (!queue.capture) {
    if (graph->origin->capture != graph) return capture_isolation;  // that capture has ended
    queue.capture = graph;
    graph->members.push_back(&queue);
  }
  if (queue.capture != graph) return capture_isolation;
  add_new(queue.last, waited->last);
  return success;
}
int cuEventSynchronize(void* event) {
  const FakeCall call("cuEventSynchronize");
  if (const int status = unsafe_call(); status != success) return status;
  auto* waited = static_cast<Event*>(event);
  std::unique_lock lock(waited->mutex);
  const auto point = waited->point;
  const StreamClock clock = waited->clock;
  lock.unlock();
  if (point) point->wait();
  access_order().host_waits(clock);
  return success;
}
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  const FakeCall call("cuEventElapsedTime");
  for (void* event : {begin, end}) {
    const auto& point = static_cast<Event*>(event)->point;
    if (!point) return invalid_handle;
    if (!point->reached) return not_ready;
  }
  const auto passed = static_cast<Event*>(end)->point->when - static_cast<Event*>(begin)->point->when;
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return success;
}
int cuEventQuery(void* event) {
  const FakeCall call("cuEventQuery");
  if (const int status = unsafe_call(); status != success) return status;
  auto* asked = static_cast<Event*>(event);
  std::lock_guard lock(asked->mutex);
  if (asked->point && !asked->point->reached) return not_ready;
  access_order().host_waits(asked->clock);
  return success;
}
int cuStreamSynchronize(void* stream) {
  const FakeCall call("cuStreamSynchronize");
  auto point = std::make_shared<Point>();
  const StreamClock clock = access_order().now(&queue_of(stream));
  queue_of(stream).push([point] { point->reach(); });
  point->wait();
  access_order().host_waits(clock);
  return success;
}
int cuMemAlloc_v2(unsigned long long* address, std::size_t bytes) {
  const FakeCall call("cuMemAlloc_v2");
  if (const int status = unsafe_call(); status != success) return status;
  void* block = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  if (block == nullptr) return 2;
  *address = reinterpret_cast<unsigned long long>(block);
  std::lock_guard lock(memory_mutex);
  memory()[*address] = {bytes, current_device()};
  return success;
}
int cuMemFree_v2(unsigned long long address) {
  const FakeCall call("cuMemFree_v2");
  std::unique_lock lock(memory_mutex);
  const auto found = memory().find(address);
  const std::size_t bytes = found == memory().end() ? 0 : found->second.first;
  lock.unlock();  // the other stand-in asks back
  fake_cuda_check_free(address, bytes);
  lock.lock();
  const auto freed = memory().extract(address);
  if (freed.empty()) return invalid_value;
  access_order().forget(address, freed.mapped().first);
  fake_cuda_forget_writes(address, freed.mapped().first);
  std::free(reinterpret_cast<void*>(address));
  return success;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, std::size_t bytes, void* stream) {
  const FakeCall call("cuMemsetD8Async");
  fake_cuda_access(stream, reinterpret_cast<const void*>(to), bytes, true, "a fill");
  queue_of(stream).push([=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
  return success;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, std::size_t bytes, void* stream) {
  const FakeCall call("cuMemcpyAsync");
  fake_cuda_access(stream, reinterpret_cast<const void*>(from), bytes, false, "a copy from");
  fake_cuda_access(stream, reinterpret_cast<const void*>(to), bytes, true, "a copy to");
  queue_of(stream).push([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return success;
}
// For tests: how many owners' kernels ever ran side by side on one device.
int fake_cuda_most_owners() {
  std::lock_guard lock(kernels_mutex);
  return static_cast<int>(most_owners);
}
// For tests: how often this happened.
int fake_cuda_count(const char* name) {
  std::lock_guard lock(counts_mutex);
  return counts()[name];
}
// For tests: what this thread (`others`: what all but this one) has called since the last question, as "name count"
// lines, cut at `bytes`; and the nanoseconds that this one was inside.
long long fake_cuda_calls(int others, char* text, std::size_t bytes) {
  std::map<std::string_view, long> counts;
  {
    std::lock_guard all(all_calls_mutex);
    for (Calls* one : all_calls()) {
      if ((one == &calls()) == (others != 0)) continue;
      std::lock_guard lock(one->mutex);
      for (const auto& [name, count] : one->counts) counts[name] += count;
      one->counts.clear();
    }
  }
  std::string lines;
  for (const auto& [name, count] : counts) lines += std::string(name) + " " + std::to_string(count) + "\n";
  if (bytes > 0) text[lines.copy(text, bytes - 1)] = '\0';
  return std::exchange(calls().inside, {}).count();
}
// For tests: a stream that is busy for a while.
int fake_cuda_busy(void* stream, int milliseconds) {
  queue_of(stream).push([=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }, "task busy");
  return success;
}
// For tests: a kernel that computes for a while on what is free of the device, up to so many multiprocessors; `label`
// without blanks.
int fake_cuda_compute(int device, void* stream, int microseconds, int most, const char* label) {
  const std::uint64_t number = fake_cuda_trace(stream, device, std::string("kernel 1 - compute 0 1 - ") + label);
  static const char owner = 0;
  queue_of(stream).push([=] {
    const int taken = fake_cuda_begin_kernel(device, &owner, 1, most, number);
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    fake_cuda_end_kernel(device, &owner, taken);
    fake_trace_mark(number, 'e');
  });
  return success;
}
int cuPointerGetAttribute(void* value, int attribute, unsigned long long address) {
  const FakeCall call("cuPointerGetAttribute");
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
  const FakeCall call("cuGetErrorName");
  *name = status == success               ? "CUDA_SUCCESS"
          : status == not_ready           ? "CUDA_ERROR_NOT_READY"
          : status == 2                   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : status == deinitialized       ? "CUDA_ERROR_DEINITIALIZED"
          : status == invalid_handle      ? "CUDA_ERROR_INVALID_HANDLE"
          : status == not_supported       ? "CUDA_ERROR_NOT_SUPPORTED"
          : status == 209                 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : status == 700                 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : status == capture_unsupported ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : status == capture_invalidated ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
          : status == capture_unjoined    ? "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
          : status == capture_isolation   ? "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"
                                          : "CUDA_ERROR_INVALID_VALUE";
  return success;
}
}
