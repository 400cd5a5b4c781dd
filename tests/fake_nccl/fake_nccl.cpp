// A libnccl without a GPU, for tests: NCCL's binary interface of the version FAKE_NCCL_VERSION, "device" memory of the
// fake CUDA driver, bytes over TCP. Operations run in their stream's order, in its thread, as NCCL's kernels do.
//
// FAKE_NCCL_FAULT=name@rank makes that rank of every communicator misbehave:
//   init_fail    set-up ends with a system error          init_hang    set-up never ends
//   call_hang    ncclAllReduce returns when aborted       stream_hang  an all_reduce starts and never ends
//   async_error  as stream_hang, and the communicator has an asynchronous error
//   abort_hang   ncclCommAbort does not return            shrink_fail  ncclCommShrink fails
//   refuse       ncclAllReduce finds an invalid argument           split_fail   ncclCommSplit fails
//   other_hash   a plugin is told another hash of the unique id than NCCL's
//   refuse_kept  as refuse, and meanwhile it is the communicator's asynchronous error too
//
// NCCL_FAKE_NAME and NCCL_FAKE_US (fake_comm.hpp) are for traces of the devices; each image has its own.
//
// From 2.28 on a plugin of NCCL_NET_PLUGIN carries what goes between hosts where netName is its name (plugin_net.hpp).
//
// As the real one: a kernel has its multiprocessors until those of all ranks have been there; a group of a communicator
// that is not blocking goes on in a thread, and what it refuses stays its asynchronous error; two ranks on one GPU of
// one host are refused; an end waits for graphs to be destroyed.
#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>

#include <strings.h>
#include <unistd.h>

#include <arpa/inet.h>

#include "device_trace.hpp"
#include "fake_comm.hpp"
#include "fake_cuda.hpp"
#include "reduction.hpp"

using namespace fake_nccl;

extern "C" {
int cuStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id, void**, const void**, std::size_t*);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
int cuEventCreate(void** event, unsigned flags);
int cuEventDestroy_v2(void* event);
int cuEventRecord(void* event, void* stream);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
}

namespace {

// sizeof(ncclConfig_t) in the header of this version.
constexpr std::size_t config_bytes = version >= 23203   ? 120
                                     : version >= 23102 ? 112
                                     : version >= 23003 ? 96
                                     : version >= 22900 ? 88
                                     : version >= 22800 ? 80
                                     : version >= 22700 ? 72
                                                        : 48;

// Says which NCCL call is at fault, for ncclGetLastError.
std::mutex error_mutex;
std::string& last_error() {
  static auto* text = new std::string();
  return *text;
}

}  // namespace

namespace fake_nccl {

int fail(int result, const std::string& text) {
  std::lock_guard lock(error_mutex);
  last_error() = text;
  return result;
}

bool has_fault(const ncclComm& comm, const std::string& name) {
  const char* fault = std::getenv("FAKE_NCCL_FAULT");
  return fault != nullptr && fault == name + "@" + std::to_string(comm.rank);
}

}  // namespace fake_nccl

namespace {

void sleep_until(const std::atomic<bool>& stop) {
  while (!stop) ::usleep(1000);
}

char* bytes_of(const void* data) { return static_cast<char*>(const_cast<void*>(data)); }

struct Gpu {
  std::size_t host;
  int device;
  bool operator==(const Gpu& other) const { return host == other.host && device == other.device; }
};

// With the ranks of other hosts, which get the handles by the sockets.
bool connect_plugin(ncclComm& comm, const std::vector<int>& far) {
  const auto size = static_cast<std::size_t>(comm.size);
  std::vector<PluginHandle> own(size), others(size);
  std::vector<Transfer> sends, recvs;
  for (const int peer : far) {
    const auto at = static_cast<std::size_t>(peer);
    if (!comm.plugin->listen(peer, own[at])) return false;
    sends.push_back({peer, own[at].bytes, sizeof(PluginHandle)});
    recvs.push_back({peer, others[at].bytes, sizeof(PluginHandle)});
  }
  if (!transfer(comm.sockets, sends, recvs, comm.stop)) return false;
  for (bool all_up = false; !all_up; ::usleep(100)) {
    all_up = true;
    for (const int peer : far) {
      bool is_up = comm.plugin->has(peer);
      if (!is_up && !comm.plugin->connect(peer, others[static_cast<std::size_t>(peer)], is_up)) return false;
      all_up = all_up && is_up;
    }
    if (comm.stop) return false;
  }
  return true;
}

void set_up(ncclComm& comm, const sockaddr_in& root) {
  if (has_fault(comm, "init_hang")) sleep_until(comm.stop);
  if (has_fault(comm, "init_fail")) {
    comm.state = fail(system_error, "fake: set-up fails as asked");
    return;
  }
  comm.sockets = connect_all(root, comm.rank, comm.size, comm.stop);
  if (comm.sockets.empty()) {
    comm.state = fail(system_error, "fake: cannot connect");
    return;
  }
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  const char* host = std::getenv("NCCL_HOSTID");
  const Gpu own{std::hash<std::string>()(host == nullptr ? name : host), comm.device};
  std::vector<Gpu> gpus(static_cast<std::size_t>(comm.size), own);
  std::vector<Transfer> sends, recvs;
  for (int peer = 0; peer < comm.size; ++peer) {
    if (peer == comm.rank) continue;
    sends.push_back({peer, bytes_of(&own), sizeof(own)});
    recvs.push_back({peer, bytes_of(&gpus[static_cast<std::size_t>(peer)]), sizeof(own)});
  }
  if (!transfer(comm.sockets, sends, recvs, comm.stop)) {
    comm.state = fail(system_error, "fake: a peer has left in set-up");
    return;
  }
  if (std::count(gpus.begin(), gpus.end(), own) > 1) {
    comm.state = fail(invalid_usage, "fake: Duplicate GPU detected: rank " + std::to_string(comm.rank) +
                                         " and another are on CUDA device " + std::to_string(comm.device));
    return;
  }
  std::vector<int> far;
  for (int peer = 0; comm.plugin != nullptr && peer < comm.size; ++peer)
    if (gpus[static_cast<std::size_t>(peer)].host != own.host) far.push_back(peer);
  comm.state = connect_plugin(comm, far) ? success : system_error;
}

// As long as it lives, a thread is inside a call with the communicator.
class Inside {
public:
  explicit Inside(ncclComm* comm) : comm_(comm) {
    if (fake_cuda_has_shut_down()) fake_cuda_misuse("NCCL was called after the driver's end");
    ++comm_->inside;
  }
  ~Inside() { --comm_->inside; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

private:
  ncclComm* comm_;
};

// An operation of a group.
struct Operation {
  ncclComm* comm;
  void* stream;
  std::function<bool()> collective;  // null: a transfer
  bool is_send = false;
  Transfer block{};
  // Of a collective on this rank.
  const void* read = nullptr;
  std::size_t read_bytes = 0;
  void* write = nullptr;
  std::size_t write_bytes = 0;
  const char* name = "";
};
thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

bool move(ncclComm& comm, std::vector<Transfer> sends, std::vector<Transfer> recvs) {
  // To itself: matched in order.
  const auto take_own = [&](std::vector<Transfer>& all) {
    std::vector<Transfer> own;
    std::erase_if(all, [&](const Transfer& block) {
      if (block.peer == comm.rank) own.push_back(block);
      return block.peer == comm.rank;
    });
    return own;
  };
  const auto own_sends = take_own(sends), own_recvs = take_own(recvs);
  if (own_sends.size() != own_recvs.size()) return false;
  for (std::size_t i = 0; i < own_sends.size(); ++i) {
    if (own_sends[i].bytes != own_recvs[i].bytes) return false;
    std::memmove(own_recvs[i].data, own_sends[i].data, own_sends[i].bytes);
  }
  return transfer(comm.sockets, sends, recvs, comm.stop, comm.plugin.get());
}

// Lets the stream wait for the communicator's last operation on another one.
void begin_behind_last(ncclComm& comm, void* stream) {
  int status = 0;
  unsigned long long capture_id = 0;
  cuStreamGetCaptureInfo_v2(stream, &status, &capture_id, nullptr, nullptr, nullptr);
  ncclComm::Last& last = status == 0 ? comm.last : comm.last_captured;
  if (last.end != nullptr && last.stream != stream && last.capture_id == capture_id)
    cuStreamWaitEvent(stream, last.end, 0);
  if (last.end == nullptr) cuEventCreate(&last.end, 0);
  last.stream = stream;
  last.capture_id = capture_id;
}

void end_as_last(ncclComm& comm, void* stream) {
  cuEventRecord((fake_cuda_is_capturing(stream) ? comm.last_captured : comm.last).end, stream);
}

// Multiprocessors of the kernel. Messages alone take two channels for each peer, as NCCL over a network.
int ctas_of(const ncclComm& comm, const std::vector<Operation>& operations) {
  std::set<int> peers;
  for (const Operation& operation : operations) {
    if (operation.collective) return comm.ctas;
    peers.insert(operation.block.peer);
  }
  return std::min(comm.ctas, 2 * static_cast<int>(peers.size()));
}

// The kernel's line in the trace.
std::string line_of(ncclComm& comm, const std::vector<Operation>& operations) {
  std::string parts;
  for (const Operation& operation : operations) {
    if (!parts.empty()) parts += ',';
    const int peer = operation.block.peer;
    parts += operation.collective ? "all:" + std::to_string(++comm.collectives)
             : operation.is_send  ? "s" + std::to_string(peer) + ":" + std::to_string(++comm.sends[peer])
                                  : "r" + std::to_string(peer) + ":" + std::to_string(++comm.recvs[peer]);
  }
  return "kernel " + std::to_string(ctas_of(comm, operations)) + " " + ::inet_ntoa(comm.root.sin_addr) + ":" +
         std::to_string(ntohs(comm.root.sin_port)) + " " + comm.name + " " + std::to_string(comm.rank) + " " +
         std::to_string(comm.size) + " " + parts + " " + operations.front().name;
}

int launch(std::vector<Operation> operations) {
  // One task for each communicator and stream, as NCCL launches one kernel.
  std::map<std::pair<ncclComm*, void*>, std::vector<Operation>> tasks;
  for (Operation& operation : operations) tasks[{operation.comm, operation.stream}].push_back(operation);
  for (auto& [key, parts] : tasks) {
    ncclComm* const comm = key.first;
    const bool is_captured = fake_cuda_is_capturing(key.second);
    if (!is_captured) ++comm->running;
    begin_behind_last(*comm, key.second);
    for (const Operation& part : parts) {
      fake_cuda_access(key.second, part.read, part.read_bytes, false, "an operation's input");
      fake_cuda_access(key.second, part.write, part.write_bytes, true, "an operation's output");
      if (!part.collective)
        fake_cuda_access(key.second, part.block.data, part.block.bytes, !part.is_send, "a message's buffer");
    }
    const int ctas = ctas_of(*comm, parts);
    const std::uint64_t number = is_captured ? 0 : fake_cuda_trace(key.second, comm->device, line_of(*comm, parts));
    fake_cuda_enqueue(key.second, [comm, number, ctas, is_captured, graph = is_captured ? comm->graphs : nullptr,
                                   parts = std::move(parts)] {
      if (is_captured) ++comm->running;
      const int taken = fake_cuda_begin_kernel(comm->device, comm, ctas, ctas, number);
      bool good = true;
      std::vector<Transfer> sends, recvs;
      for (const Operation& part : parts) {
        if (!part.collective)
          (part.is_send ? sends : recvs).push_back(part.block);
        else
          good = good && part.collective();
      }
      good = good && move(*comm, std::move(sends), std::move(recvs));
      // A plugin has said what it is.
      if (!good && comm->state == success)
        comm->state = comm->plugin ? remote_error : fail(remote_error, "fake: a peer is gone or sizes differ");
      if (good && comm->kernel_us > 0) ::usleep(static_cast<useconds_t>(comm->kernel_us));
      // A kernel that cannot go on spins until it is aborted.
      if (!good) sleep_until(comm->stop);
      fake_cuda_end_kernel(comm->device, comm, taken);
      fake_trace_mark(number, 'e');
      --comm->running;
    });
    end_as_last(*comm, key.second);
  }
  return success;
}

int flush() {
  std::vector<Operation> operations;
  operations.swap(group);
  std::set<ncclComm*> in_background;
  for (const Operation& operation : operations)
    if (!operation.comm->is_blocking) in_background.insert(operation.comm);
  if (in_background.empty()) return launch(std::move(operations));
  fake_cuda_note("in_progress");
  void* context = nullptr;
  cuCtxGetCurrent(&context);
  ncclComm* const first = *in_background.begin();
  for (ncclComm* comm : in_background) comm->state = in_progress;
  if (first->group_end.joinable()) first->group_end.join();
  first->group_end = std::thread([operations = std::move(operations), in_background, context]() mutable {
    cuCtxSetCurrent(context);
    ::usleep(std::random_device()() % 3000);
    launch(std::move(operations));
    for (ncclComm* comm : in_background) comm->state = success;
  });
  return in_progress;
}

// Refuses a call; of a communicator that is not blocking this is its state from now on.
int refuse(ncclComm* comm, const std::string& text) {
  if (comm != nullptr && !comm->is_blocking) comm->state = invalid_argument;
  return fail(invalid_argument, text);
}

int add(Operation operation) {
  ncclComm* comm = operation.comm;
  if (comm == nullptr) return fail(invalid_argument, "fake: no communicator");
  if (comm->state == in_progress || comm->state == invalid_argument)
    return fail(invalid_argument, "fake: communicator used before its previous operation returned ncclSuccess");
  if (fake_cuda_has_shut_down()) fake_cuda_misuse("NCCL was called after the driver's end");
  operation.name = fake_cuda_call();
  group.push_back(std::move(operation));
  return group_depth > 0 ? success : flush();
}

struct Range {
  const void* begin;
  std::size_t bytes;
};

int add_collective(ncclComm* comm, void* stream, Range read, Range written, std::function<bool()> run) {
  return add({comm, stream, std::move(run), false, {}, read.begin, read.bytes, bytes_of(written.begin), written.bytes});
}

// Everybody's `bytes` from `data`, in the order of ranks.
bool collect(ncclComm& comm, Part part, const void* data, std::size_t bytes, std::vector<std::vector<char>>& all) {
  all.assign(static_cast<std::size_t>(comm.size), std::vector<char>(bytes));
  std::vector<Transfer> sends, recvs;
  for (int peer = 0; peer < comm.size; ++peer) {
    sends.push_back({peer, bytes_of(data), bytes, part});
    recvs.push_back({peer, all[static_cast<std::size_t>(peer)].data(), bytes, part});
  }
  return move(comm, std::move(sends), std::move(recvs));
}

bool reduce_all(ncclComm& comm, Part part, const void* data, void* out, std::size_t skip_elements,
                std::size_t out_elements, std::size_t total_elements, int type, int op) {
  std::vector<std::vector<char>> all;
  if (!collect(comm, part, data, total_elements * element_bytes(type), all)) return false;
  if (out == nullptr) return true;
  std::vector<const char*> inputs;
  for (const auto& one : all) inputs.push_back(one.data() + skip_elements * element_bytes(type));
  reduce(out, inputs, out_elements, type, op, op >= 5 ? comm.scales[op] : 1.0);
  return true;
}

bool is_bad(int type, int op) { return element_bytes(type) == 0 || op < 0; }

}  // namespace

extern "C" {

int ncclGetVersion(int* out) {
  const FakeCall call("ncclGetVersion");
  if (out == nullptr) return invalid_argument;
  *out = version;
  return success;
}

const char* ncclGetErrorString(int result) {
  constexpr const char* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};
  return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm*) {
  static thread_local std::string copy;
  std::lock_guard lock(error_mutex);
  copy = last_error();
  return copy.c_str();
}

int ncclGetUniqueId(UniqueId* id) {
  const FakeCall call("ncclGetUniqueId");
  if (id == nullptr) return invalid_argument;
  std::memset(id, 0, sizeof(*id));
  id->magic = 0x484f4c4d4553;
  id->root = interface_address();
  if (id->root.sin_family == 0) return fail(invalid_usage, "fake: no socket interface found");
  return start_root(id->root) ? success : fail(system_error, "fake: cannot listen");
}

int ncclCommInitRankConfig(ncclComm** comm, int size, UniqueId id, int rank, const char* config) {
  const FakeCall call("ncclCommInitRankConfig");
  std::size_t bytes = 0;
  unsigned magic = 0, caller_version = 0;
  std::memcpy(&bytes, config, 8);
  std::memcpy(&magic, config + 8, 4);
  std::memcpy(&caller_version, config + 12, 4);
  // The real library takes any size; ours wants what its own header says, to find mistakes.
  if (magic != 0xcafebeef || bytes != config_bytes || caller_version != static_cast<unsigned>(version))
    return fail(invalid_argument, "fake: config of " + std::to_string(bytes) + " bytes, version " +
                                      std::to_string(caller_version) + "; expected " + std::to_string(config_bytes));
  for (std::size_t at = 44; at + 4 <= config_bytes; at += 4) {
    if ((at >= 48 && at < 56) || at == 116) continue;  // commName, a pointer; padding
    int field = 0;
    std::memcpy(&field, config + at, 4);
    if (version >= 22600 && field != INT_MIN && at != 44 && at != 60 && at != 96)
      return fail(invalid_argument, "fake: config field at " + std::to_string(at) + " is not the default");
  }
  constexpr std::pair<const char*, std::size_t> told[] = {{"cgaClusterSize", 20}, {"minCTAs", 24},
                                                          {"maxCTAs", 28},        {"splitShare", 40},
                                                          {"trafficClass", 44},   {"CTAPolicy", 60}};
  for (const auto& [name, at] : told) {
    int field = INT_MIN;
    if (at + 4 <= config_bytes) std::memcpy(&field, config + at, 4);
    if (field != INT_MIN && (at != 44 || version >= 22600))
      fake_cuda_note((std::string(name) + "=" + std::to_string(field)).c_str());
  }
  const char* comm_name = nullptr;
  if (config_bytes > 56) std::memcpy(&comm_name, config + 48, sizeof(comm_name));
  if (comm_name != nullptr) fake_cuda_note(("commName=" + std::string(comm_name)).c_str());
  auto* made = new ncclComm();
  made->rank = rank;
  made->size = size;
  made->device = fake_cuda_device();
  if (const char* name = std::getenv("NCCL_FAKE_NAME")) made->name = name;
  if (const char* time = std::getenv("NCCL_FAKE_US")) made->kernel_us = std::atoi(time);
  int blocking = 0;
  std::memcpy(&blocking, config + 16, 4);
  made->is_blocking = blocking != 0;
  int max_ctas = INT_MIN;
  std::memcpy(&max_ctas, config + 28, 4);
  if (max_ctas != INT_MIN) made->ctas = std::min(max_ctas, usual_ctas);
  const char* net = nullptr;
  std::memcpy(&net, config + 32, sizeof(net));
  if (net != nullptr) made->net_name = net;
  *comm = made;
  // Without a name NCCL takes a plugin where there is one; this one knows no other choice.
  const char* plugin = std::getenv("NCCL_NET_PLUGIN");
  const bool has_plugin = net == nullptr && plugin != nullptr && std::string(plugin) != "none";
  if (const char* wanted = std::getenv("NCCL_NET"); wanted != nullptr) made->net_name = wanted;
  // The binary interfaces before have no communicators.
  const bool is_built_in = ::strcasecmp(made->net_name.c_str(), "Socket") == 0 || made->net_name == "IB";
  if (version >= 22800) find_plugins();
  if (version >= 22800 && !made->net_name.empty() && !is_built_in) {
    const std::uint64_t hash = comm_hash_of(&id, sizeof id) + (has_fault(*made, "other_hash") ? 1 : 0);
    made->plugin = open_plugin_net(made->net_name, hash, size);
    if (made->plugin == nullptr) {
      made->state = invalid_usage;
      return made->state;
    }
  } else if (!has_plugin && !is_built_in) {
    made->state = fail(invalid_usage, "fake: netName '" + made->net_name + "' is none that exists");
    return made->state;
  }
  made->root = id.root;
  made->setup = std::thread([made, root = id.root] { set_up(*made, root); });
  if (!made->is_blocking) return in_progress;
  made->setup.join();
  return made->state;
}

// For benchmarks that compare with raw calls: blocking, sockets.
int ncclCommInitRank(ncclComm** comm, int size, UniqueId id, int rank) {
  const FakeCall call("ncclCommInitRank");
  auto* made = new ncclComm();
  made->rank = rank;
  made->size = size;
  made->device = fake_cuda_device();
  made->root = id.root;
  set_up(*made, id.root);
  *comm = made;
  return made->state;
}

int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  const FakeCall call("ncclCommGetAsyncError");
  if (comm == nullptr || error == nullptr) return invalid_argument;
  if (fake_cuda_has_shut_down()) fake_cuda_misuse("NCCL was called after the driver's end");
  *error = has_fault(*comm, "refuse_kept") ? invalid_argument : comm->state.load();
  return success;
}

int ncclCommCount(ncclComm* comm, int* count) {
  if (comm == nullptr || count == nullptr) return invalid_argument;
  *count = comm->size;
  return success;
}
int ncclCommUserRank(ncclComm* comm, int* rank) {
  if (comm == nullptr || rank == nullptr) return invalid_argument;
  *rank = comm->rank;
  return success;
}

static void wait_for_graphs(ncclComm* comm) {
  while (comm->graphs.use_count() > 1) ::usleep(1000);
}

int ncclCommFinalize(ncclComm* comm) {
  const FakeCall call("ncclCommFinalize");
  if (comm == nullptr) return success;
  const Inside inside(comm);
  while (comm->running > 0) ::usleep(100);
  wait_for_graphs(comm);
  return success;
}

static void end(ncclComm* comm) {
  if (fake_cuda_has_shut_down()) fake_cuda_misuse("NCCL was called after the driver's end");
  comm->stop = true;
  if (comm->setup.joinable()) comm->setup.join();
  while (comm->inside > 0) ::usleep(100);
  if (comm->group_end.joinable()) comm->group_end.join();
  while (comm->running > 0) ::usleep(100);
  wait_for_graphs(comm);
  for (const auto* last : {&comm->last, &comm->last_captured})
    if (last->end != nullptr) cuEventDestroy_v2(last->end);
  comm->plugin.reset();
  for (const int fd : comm->sockets)
    if (fd >= 0) ::close(fd);
  if (!comm->root_file.empty()) std::remove(comm->root_file.c_str());
  delete comm;
}

int ncclCommDestroy(ncclComm* comm) {
  const FakeCall call("ncclCommDestroy");
  if (comm != nullptr) end(comm);
  return success;
}

int ncclCommAbort(ncclComm* comm) {
  const FakeCall call("ncclCommAbort");
  if (comm == nullptr) return success;
  if (has_fault(*comm, "abort_hang")) ::sleep(3600);
  end(comm);
  return success;
}

int ncclGroupStart() {
  const FakeCall call("ncclGroupStart");
  ++group_depth;
  return success;
}
int ncclGroupEnd() {
  const FakeCall call("ncclGroupEnd");
  if (group_depth == 0) return invalid_usage;
  return --group_depth == 0 ? flush() : success;
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, ncclComm* comm) {
  const FakeCall call("ncclRedOpCreatePreMulSum");
  if (residence != 1 || (type != 6 && type != 7 && type != 8 && type != 9)) return invalid_argument;
  comm->scales[comm->next_op] = scalar_value(scalar, type);
  *op = comm->next_op++;
  return success;
}
int ncclRedOpDestroy(int, ncclComm*) { return success; }

int ncclAllReduce(const void* send, void* recv, std::size_t count, int type, int op, ncclComm* comm, void* stream) {
  const FakeCall call("ncclAllReduce");
  if (comm == nullptr || is_bad(type, op)) return fail(invalid_argument, "fake: all_reduce");
  if (has_fault(*comm, "refuse") || has_fault(*comm, "refuse_kept"))
    return refuse(comm, "fake: an invalid argument as asked");
  if (has_fault(*comm, "call_hang")) {
    const Inside inside(comm);
    sleep_until(comm->stop);
    return fail(internal_error, "fake: aborted in a call");
  }
  if (has_fault(*comm, "stream_hang") || has_fault(*comm, "async_error")) {
    const bool tells = has_fault(*comm, "async_error");
    return add_collective(comm, stream, {}, {}, [=] {
      if (tells) comm->state = fail(remote_error, "fake: an asynchronous error as asked");
      sleep_until(comm->stop);
      return true;
    });
  }
  return add_collective(comm, stream, {send, count * element_bytes(type)}, {recv, count * element_bytes(type)},
                        [=] { return reduce_all(*comm, Part::all_reduce, send, recv, 0, count, count, type, op); });
}

int ncclReduce(const void* send, void* recv, std::size_t count, int type, int op, int root, ncclComm* comm,
               void* stream) {
  const FakeCall call("ncclReduce");
  if (comm == nullptr || is_bad(type, op)) return fail(invalid_argument, "fake: reduce");
  void* out = comm->rank == root ? recv : nullptr;
  return add_collective(comm, stream, {send, count * element_bytes(type)},
                        {out, out == nullptr ? 0 : count * element_bytes(type)},
                        [=] { return reduce_all(*comm, Part::reduce, send, out, 0, count, count, type, op); });
}

int ncclReduceScatter(const void* send, void* recv, std::size_t count, int type, int op, ncclComm* comm, void* stream) {
  const FakeCall call("ncclReduceScatter");
  if (comm == nullptr || is_bad(type, op)) return fail(invalid_argument, "fake: reduce_scatter");
  return add_collective(comm, stream, {send, count * element_bytes(type) * static_cast<std::size_t>(comm->size)},
                        {recv, count * element_bytes(type)}, [=] {
                          return reduce_all(*comm, Part::reduce_scatter, send, recv,
                                            static_cast<std::size_t>(comm->rank) * count, count,
                                            count * static_cast<std::size_t>(comm->size), type, op);
                        });
}

int ncclBroadcast(const void* send, void* recv, std::size_t count, int type, int root, ncclComm* comm, void* stream) {
  const FakeCall call("ncclBroadcast");
  if (comm == nullptr || is_bad(type, 0)) return fail(invalid_argument, "fake: broadcast");
  return add_collective(comm, stream, {send, comm->rank == root ? count * element_bytes(type) : 0},
                        {recv, count * element_bytes(type)}, [=] {
                          const std::size_t bytes = count * element_bytes(type);
                          std::vector<Transfer> sends, recvs;
                          if (comm->rank == root)
                            for (int peer = 0; peer < comm->size; ++peer)
                              sends.push_back({peer, bytes_of(send), bytes, Part::broadcast});
                          recvs.push_back({root, bytes_of(recv), bytes, Part::broadcast});
                          return move(*comm, std::move(sends), std::move(recvs));
                        });
}

int ncclBcast(void* data, std::size_t count, int type, int root, ncclComm* comm, void* stream) {
  const FakeCall call("ncclBcast");
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

int ncclAllGather(const void* send, void* recv, std::size_t count, int type, ncclComm* comm, void* stream) {
  const FakeCall call("ncclAllGather");
  if (comm == nullptr || is_bad(type, 0)) return fail(invalid_argument, "fake: all_gather");
  return add_collective(
      comm, stream, {send, count * element_bytes(type)},
      {recv, count * element_bytes(type) * static_cast<std::size_t>(comm->size)}, [=] {
        const std::size_t bytes = count * element_bytes(type);
        std::vector<Transfer> sends, recvs;
        for (int peer = 0; peer < comm->size; ++peer) {
          sends.push_back({peer, bytes_of(send), bytes, Part::all_gather});
          recvs.push_back({peer, bytes_of(recv) + static_cast<std::size_t>(peer) * bytes, bytes, Part::all_gather});
        }
        return move(*comm, std::move(sends), std::move(recvs));
      });
}

int ncclSend(const void* data, std::size_t count, int type, int peer, ncclComm* comm, void* stream) {
  const FakeCall call("ncclSend");
  return add({comm, stream, nullptr, true, {peer, bytes_of(data), count * element_bytes(type)}});
}
int ncclRecv(void* data, std::size_t count, int type, int peer, ncclComm* comm, void* stream) {
  const FakeCall call("ncclRecv");
  return add({comm, stream, nullptr, false, {peer, bytes_of(data), count * element_bytes(type)}});
}
}
