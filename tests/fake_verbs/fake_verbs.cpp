// A stand-in for libibverbs: HCAs fake0 to fake5, whose ports reach each other, for ranks that are threads of one
// process. It delays and interleaves what is posted by seed, loses a request or an HCA where it is told to, and ends
// the process where a real HCA would be misused: memory that is not registered, a receive that was not posted (a real
// sender would wait), queues that overflow, objects that are destroyed while they are used.
#include "fake_verbs.hpp"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "holmes/transport/rdma/abi.hpp"

namespace holmes::verbs {

struct Device {
  const char* name;
  // Of what is sent from it and to it, whether it arrives; what does, may come to nobody's knowledge.
  bool is_mute = false;
  bool is_deaf = false;
  long slowness = 1;  // of reads
  // Its port, which tells so: nothing goes over it, but who sends tries for a while.
  bool is_down = false;
  std::chrono::steady_clock::time_point down_since{};
  std::chrono::steady_clock::time_point up_at = std::chrono::steady_clock::time_point::max();  // by itself
};

}  // namespace holmes::verbs

namespace {

using namespace holmes::verbs;
using Clock = std::chrono::steady_clock;

constexpr int receive_opcode = 129;  // IBV_WC_RECV_RDMA_WITH_IMM
constexpr int gid_change = 18;       // IBV_EVENT_GID_CHANGE

[[noreturn]] void misused(const std::string& how) {
  std::fprintf(stderr, "fake verbs: %s\n", how.c_str());
  std::abort();
}

struct Channel : CompletionChannel {
  int write_end = -1;
  int queues = 0;
};

struct Queue : CompletionQueue {
  std::deque<WorkCompletion> completions;
  bool is_armed = false;
  bool is_for_solicited = false;  // only, and for errors
  unsigned unacknowledged = 0;
  int pairs = 0;
};

struct OpenContext : Context {
  std::deque<AsyncEvent> events;  // a byte in the pipe for each
  int event_write_end = -1;
};

// Lost: it does not arrive. Unanswered: it does, but the sender never learns that.
enum class Fate { fine, lost, unanswered };

struct Sending {
  SendRequest request;
  Fate fate = Fate::fine;
  std::vector<std::byte> bytes{};  // of an inline request
  ScatterEntry entry{};
  std::uint64_t number = 0;
  Clock::time_point due;
};

// That a message has come.
struct Arrived {
  WorkCompletion completion;
  bool is_solicited = false;
  Clock::time_point due;
};

struct Pair : QueuePair {
  QpCapacity capacity{};
  std::deque<Sending> sends;    // not carried out
  std::deque<Sending> answers;  // carried out, not acknowledged
  std::deque<std::uint64_t> receives;
  QpAttributes attributes{};
  Clock::time_point flush_at{};  // of receives
  std::deque<Arrived> arrived;   // what is told late
  std::uint64_t posted = 0;
  std::uint64_t retired = 0;  // requests before one whose completion was polled
  int untold = 0;             // events of it that were taken and not acknowledged
};

// A packet that is still on its way when its sender has given up.
struct Straggler {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  SendRequest request;
  std::vector<std::byte> bytes;
  Clock::time_point due;
};

// Whole words at a time, as an HCA does: they may be read meanwhile. What orders them is the mutex under which the
// completion that tells of them is polled, not each word: the thread sanitizer would keep a clock of its own for each.
void write(std::uint64_t to, const std::byte* from, std::size_t bytes) {
  auto* const words = reinterpret_cast<std::uint64_t*>(to);
  std::size_t done = 0;
  for (; to % sizeof(std::uint64_t) == 0 && done + sizeof(std::uint64_t) <= bytes; done += sizeof(std::uint64_t)) {
    std::uint64_t word;
    std::memcpy(&word, from + done, sizeof word);
    std::atomic_ref(words[done / sizeof word]).store(word, std::memory_order_relaxed);
  }
  std::memcpy(reinterpret_cast<std::byte*>(to) + done, from + done, bytes - done);
}

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint32_t, Pair*> pairs;
  std::map<std::uint32_t, MemoryRegion*> regions;  // by key
  std::vector<OpenContext*> contexts;
  std::mt19937 random{1};
  std::uint32_t next_number = 16;
  std::map<std::string, long> settings{
      {"delay_us", 0},        {"fail_after", -1},        {"retry_ms", 50},  {"memory_limit", -1},
      {"port_active", 1},     {"inline_limit", 256},     {"fork_state", 2}, {"hostile", 0},
      {"die_after", -1},      {"die_device", 0},         {"die_kind", 0},   {"read_us_per_mib", 0},
      {"limited_device", -1}, {"infiniband_device", -1}, {"peermem", 0},    {"dmabuf", 1}};
  std::deque<Straggler> stragglers;
  std::map<std::uint32_t, long> device_bytes;  // that were read
  std::map<std::uint32_t, int> access;         // of regions, by each of their keys
  long registered_bytes = 0;
  long read_bytes = 0;
  long pinned_out_bytes = 0;
  long pinned_in_bytes = 0;
  long gpu_out_bytes = 0;
  long gpu_in_bytes = 0;
  long registrations = 0;
  long objects = 0;
  long answered = 0;
  long events = 0;
  long posted = 0;
  long posts = 0;
  long untold = 0;  // events of HCAs that were taken and not acknowledged
  long told = 0;

  World() {
    std::thread([this] { run(); }).detach();
  }

  Clock::time_point some_time_after(Clock::time_point earliest) {
    const long most = settings["delay_us"];
    const long delay = most > 0 ? static_cast<long>(random() % static_cast<unsigned long>(most)) : 0;
    return std::max(earliest, Clock::now() + std::chrono::microseconds(delay));
  }
  void push(CompletionQueue* to, const WorkCompletion& completion, bool is_solicited = false);
  // `may_arrive`: nothing before it is lost for good.
  void flush(Pair& pair, bool may_arrive = true);
  bool is_still_sent(const Pair& pair, const Sending& sending);
  void flush_receives(Pair& pair);
  void leave_behind(const Pair& pair, const Sending& sending);
  void arrive(const Straggler& late);
  void count_down();
  void raise(OpenContext& context, const AsyncEvent& event);
  void raise(const Device& device, EventType type, int port);
  void raise_for_pairs(const Device& device);
  void set_down(Device& device, bool is_down);
  // When who sends over it gives up; nothing where it is up.
  std::optional<Clock::time_point> cut_until(const Pair& pair) const;
  void tell(Pair& pair, const WorkCompletion& completion, bool is_solicited);
  void tell_arrived(Pair& pair, Clock::time_point until);
  void break_off(Pair& pair, const Sending& sending, Status status);
  MemoryRegion& region(std::uint32_t key, std::uint64_t address, std::size_t bytes, bool is_remote);
  bool can_read(const Sending& sending) const;
  bool is_used(std::uint32_t local_key) const;
  bool is_used(std::uint64_t begin, std::size_t bytes) const;
  bool can_answer(const Pair& pair) const;
  void carry_out(Pair& pair);
  void answer(Pair& pair);
  void run();
};

World& world() {
  static World* const made = new World;  // its thread lives as long as the process
  return *made;
}

Device devices[] = {{"fake0"}, {"fake1"}, {"fake2"}, {"fake3"}, {"fake4"}, {"fake5"}};

bool can_receive(const Pair* pair) {
  return pair != nullptr && (pair->state == QpState::ready_to_receive || pair->state == QpState::ready_to_send);
}

void World::push(CompletionQueue* to, const WorkCompletion& completion, bool is_solicited) {
  Queue& queue = *static_cast<Queue*>(to);
  if (queue.completions.size() >= static_cast<std::size_t>(queue.capacity)) misused("a completion queue overflows");
  queue.completions.push_back(completion);
  if (!queue.is_armed) return;
  if (queue.is_for_solicited && !is_solicited && completion.status == Status::success) return;
  queue.is_armed = false;
  ++events;
  ++queue.unacknowledged;
  const void* const pointer = &queue;
  if (::write(static_cast<Channel*>(queue.channel)->write_end, &pointer, sizeof pointer) != sizeof pointer)
    misused("a completion channel overflows");
}

// Whether what is given up is on its way, and after it what follows: nothing overtakes it or comes without it.
bool World::is_still_sent(const Pair& pair, const Sending& sending) {
  if (sending.fate != Fate::lost || settings["hostile"] == 0) return sending.fate != Fate::lost;
  if (sending.request.opcode == Opcode::rdma_read || random() % 4 == 0) return false;
  leave_behind(pair, sending);
  return true;
}

void World::flush(Pair& pair, bool may_arrive) {
  WorkCompletion completion{};
  completion.status = Status::flushed;
  completion.qp_number = pair.number;
  for (auto* sendings : {&pair.answers, &pair.sends}) {
    for (Sending& sending : *sendings) {
      if (sendings == &pair.sends) sending.fate = Fate::lost;
      completion.id = sending.request.id;
      push(pair.send_queue, completion);
      may_arrive = may_arrive && is_still_sent(pair, sending);
    }
    sendings->clear();
  }
  // What is told of receives comes late too.
  pair.flush_at = Clock::now() + std::chrono::microseconds(settings["hostile"] != 0 ? random() % 3000 : 0);
  if (settings["hostile"] == 0) flush_receives(pair);
  changed.notify_one();
}

void World::tell(Pair& pair, const WorkCompletion& completion, bool is_solicited) {
  if (settings["hostile"] == 0) return push(pair.receive_queue, completion, is_solicited);
  auto due = Clock::now() + std::chrono::microseconds(random() % 300);
  if (!pair.arrived.empty()) due = std::max(due, pair.arrived.back().due);
  pair.arrived.push_back({completion, is_solicited, due});
}

void World::tell_arrived(Pair& pair, Clock::time_point until) {
  for (; !pair.arrived.empty() && pair.arrived.front().due <= until; pair.arrived.pop_front())
    push(pair.receive_queue, pair.arrived.front().completion, pair.arrived.front().is_solicited);
}

void World::flush_receives(Pair& pair) {
  tell_arrived(pair, Clock::time_point::max());
  WorkCompletion completion{};
  completion.status = Status::flushed;
  completion.qp_number = pair.number;
  for (const std::uint64_t id : pair.receives) {
    completion.id = id;
    push(pair.receive_queue, completion);
  }
  pair.receives.clear();
}

// It is on its way: its bytes are those of now.
void World::leave_behind(const Pair& pair, const Sending& sending) {
  Straggler late{pair.number, pair.attributes.peer_qp, sending.request, sending.bytes, Clock::now()};
  late.request.entry_count = sending.request.entry_count > 0 ? static_cast<int>(sending.entry.length) : 0;  // bytes
  if (late.bytes.empty() && late.request.entry_count > 0) {
    const auto* from = reinterpret_cast<const std::byte*>(sending.entry.address);
    late.bytes.assign(from, from + sending.entry.length);
  }
  late.due += std::chrono::microseconds(random() % 2000);
  if (!stragglers.empty()) late.due = std::max(late.due, stragglers.back().due);
  stragglers.push_back(std::move(late));
}

void World::arrive(const Straggler& late) {
  const auto found = pairs.find(late.to);
  Pair* const peer = found == pairs.end() ? nullptr : found->second;
  if (!can_receive(peer) || peer->attributes.peer_qp != late.from || peer->receives.empty()) {
    std::erase_if(stragglers, [&](const Straggler& other) { return other.from == late.from; });
    return;
  }
  if (!late.bytes.empty()) {
    region(late.request.remote_key, late.request.remote_address, late.bytes.size(), true);
    write(late.request.remote_address, late.bytes.data(), late.bytes.size());
  }
  if (late.request.opcode != Opcode::rdma_write_with_immediate) return;
  WorkCompletion completion{};
  completion.id = peer->receives.front();
  peer->receives.pop_front();
  completion.opcode = receive_opcode;
  completion.bytes = static_cast<std::uint32_t>(late.bytes.size());
  completion.immediate = late.request.immediate;
  completion.qp_number = peer->number;
  tell(*peer, completion, (late.request.flags & send_solicited) != 0);
}

// To the end of an HCA.
void World::count_down() {
  long& die_after = settings["die_after"];
  if (die_after < 0 || --die_after >= 0) return;
  Device& device = devices[settings["die_device"]];
  const long kind = settings["die_kind"];  // 0: both, 1: it hears nothing, 2: it is not heard
  if (kind >= 3) {
    set_down(device, true);
    if (kind == 4) device.up_at = Clock::now() + std::chrono::milliseconds(1 + random() % 20);
    return;
  }
  device.is_deaf |= kind != 2;
  device.is_mute |= kind != 1;
}

void World::raise(OpenContext& context, const AsyncEvent& event) {
  context.events.push_back(event);
  if (::write(context.event_write_end, "", 1) != 1) misused("nobody reads what HCAs tell");
}

void World::raise(const Device& device, EventType type, int port) {
  AsyncEvent event{};
  event.type = type;
  event.of.port = port;
  for (OpenContext* const context : contexts)
    if (context->device == &device) raise(*context, event);
}

void World::raise_for_pairs(const Device& device) {
  AsyncEvent event{};
  event.type = EventType::qp_fatal;
  for (const auto& [number, pair] : pairs) {
    event.of.pair = pair;
    if (pair->context->device == &device) raise(*static_cast<OpenContext*>(pair->context), event);
  }
}

void World::set_down(Device& device, bool is_down) {
  device.up_at = Clock::time_point::max();
  if (is_down && !device.is_down) device.down_since = Clock::now();
  device.is_down = is_down;
  raise(device, is_down ? EventType::port_error : EventType::port_active, 1);
  raise(device, is_down ? EventType::port_active : EventType::port_error, 2);  // of no concern, as this:
  raise(device, static_cast<EventType>(gid_change), 1);
  changed.notify_one();
}

std::optional<Clock::time_point> World::cut_until(const Pair& pair) const {
  std::optional<Clock::time_point> until;
  const auto look_at = [&](const Device& device) {
    if (device.is_down) until = device.down_since + std::chrono::milliseconds(settings.at("retry_ms"));
  };
  look_at(*pair.context->device);
  const auto peer = pairs.find(pair.attributes.peer_qp);
  if (peer != pairs.end()) look_at(*peer->second->context->device);
  return until;
}

void World::break_off(Pair& pair, const Sending& sending, Status status) {
  WorkCompletion completion{};
  completion.id = sending.request.id;
  completion.status = status;
  completion.qp_number = pair.number;
  pair.state = QpState::error;
  push(pair.send_queue, completion);
  flush(pair, is_still_sent(pair, sending));
}

MemoryRegion& World::region(std::uint32_t key, std::uint64_t address, std::size_t bytes, bool is_remote) {
  const auto found = regions.find(key);
  if (found == regions.end()) misused("memory is used whose key is not known");
  MemoryRegion& region = *found->second;
  const auto begin = reinterpret_cast<std::uint64_t>(region.address);
  if (key != (is_remote ? region.remote_key : region.local_key)) misused("a local key is used for a remote one");
  if (address < begin || address + bytes > begin + region.length) misused("bytes outside of registered memory");
  return region;
}

// Whether the peer allows it; what it has withdrawn is read no more.
bool World::can_read(const Sending& sending) const {
  const auto found = regions.find(sending.request.remote_key);
  if (found == regions.end() || found->second->remote_key != sending.request.remote_key) return false;
  const auto begin = reinterpret_cast<std::uint64_t>(found->second->address);
  return (access.at(sending.request.remote_key) & access_remote_read) != 0 && sending.request.remote_address >= begin &&
         sending.request.remote_address + sending.entry.length <= begin + found->second->length;
}

// Whether a request reads or writes it (what is inline has been copied).
bool World::is_used(std::uint32_t local_key) const {
  return std::ranges::any_of(pairs, [&](const auto& numbered) {
    const Pair& pair = *numbered.second;
    const auto uses = [&](const Sending& sending) {
      return sending.request.entry_count > 0 && sending.bytes.empty() && sending.entry.local_key == local_key;
    };
    return std::ranges::any_of(pair.sends, uses) || std::ranges::any_of(pair.answers, uses);
  });
}

// Whether the peer's HCA reads its memory for it.
bool World::can_answer(const Pair& pair) const {
  const auto peer = pairs.find(pair.attributes.peer_qp);
  return peer != pairs.end() && can_receive(peer->second);
}

// As above, of any bytes; and whether a peer reads them.
bool World::is_used(std::uint64_t begin, std::size_t bytes) const {
  return std::ranges::any_of(pairs, [&](const auto& numbered) {
    const Pair& pair = *numbered.second;
    const auto uses = [&](const Sending& sending) {
      if (sending.request.entry_count == 0 || !sending.bytes.empty()) return false;
      const auto overlaps = [&](std::uint64_t from) {
        return from < begin + bytes && begin < from + sending.entry.length;
      };
      return overlaps(sending.entry.address) ||
             (sending.request.opcode == Opcode::rdma_read && overlaps(sending.request.remote_address) &&
              can_answer(pair) && can_read(sending));
    };
    return std::ranges::any_of(pair.sends, uses) || std::ranges::any_of(pair.answers, uses);
  });
}

// A function of the fake CUDA driver; null where there is none.
template <class Function>
Function* of_cuda(const char* name) {
  const char* const path = std::getenv("HOLMES_CUDA_LIBRARY");
  void* const cuda = path != nullptr ? ::dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  return cuda != nullptr ? reinterpret_cast<Function*>(::dlsym(cuda, name)) : nullptr;
}

// Whether the fake CUDA driver has page-locked it; and whether it is a GPU's.
bool is_pinned(std::uint64_t begin, std::size_t bytes) {
  static auto* const holds = of_cuda<int(const void*, std::size_t)>("fake_cuda_holds");
  return holds != nullptr && holds(reinterpret_cast<const void*>(begin), bytes) != 0;
}
bool is_of_gpu(std::uint64_t begin, std::size_t bytes) {
  static auto* const owns = of_cuda<int(const void*, std::size_t)>("fake_cuda_owns");
  return owns != nullptr && owns(reinterpret_cast<const void*>(begin), bytes) != 0;
}

// What a read brings.
void write_read(std::uint64_t to, std::uint64_t from, std::size_t bytes) {
  static auto* const write_gpu = of_cuda<void(void*, const void*, std::size_t)>("fake_cuda_write");
  if (is_of_gpu(to, bytes))
    write_gpu(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  else
    write(to, reinterpret_cast<const std::byte*>(from), bytes);
}

void World::carry_out(Pair& pair) {
  Sending sending = std::move(pair.sends.front());
  pair.sends.pop_front();
  long& fail_after = settings["fail_after"];
  const bool is_chosen = fail_after == 0;
  if (fail_after >= 0) --fail_after;
  count_down();
  const auto found = pairs.find(pair.attributes.peer_qp);
  Pair* const peer = found == pairs.end() ? nullptr : found->second;
  const bool is_heard = can_receive(peer) && peer->attributes.peer_qp == pair.number && settings["port_active"] != 0 &&
                        !pair.context->device->is_mute && !peer->context->device->is_deaf && !cut_until(pair);
  const SendRequest& request = sending.request;
  const bool is_answered = is_heard && !peer->context->device->is_mute && !pair.context->device->is_deaf;
  // One that is lost may be the packets of it, the last ones, or its acknowledgement.
  const bool is_unanswered = is_heard && request.opcode != Opcode::rdma_read &&
                             (!is_answered || (is_chosen && settings["hostile"] != 0 && random() % 2 == 0));
  if (is_chosen || !is_answered) {
    // The sender tries for a while.
    sending.fate = is_unanswered ? Fate::unanswered : Fate::lost;
    sending.due = Clock::now() + std::chrono::milliseconds(settings["retry_ms"]);
    if (!is_unanswered) {
      pair.answers.push_back(std::move(sending));
      return;
    }
  }
  const bool is_read = request.opcode == Opcode::rdma_read;
  const std::size_t bytes = request.entry_count > 0 ? sending.entry.length : 0;
  if (bytes > 0 && !is_read) {
    const std::byte* from = sending.bytes.data();
    if (sending.bytes.empty()) {
      region(sending.entry.local_key, sending.entry.address, bytes, false);
      if (is_pinned(sending.entry.address, bytes)) pinned_out_bytes += static_cast<long>(bytes);
      from = reinterpret_cast<const std::byte*>(sending.entry.address);
    }
    region(request.remote_key, request.remote_address, bytes, true);
    if ((access[request.remote_key] & access_remote_write) == 0) misused("memory is written that may not be");
    write(request.remote_address, from, bytes);
  }
  if (request.opcode == Opcode::rdma_write_with_immediate) {
    if (peer->receives.empty()) misused("a message comes for which no receive is posted");
    WorkCompletion completion{};
    completion.id = peer->receives.front();
    peer->receives.pop_front();
    completion.opcode = receive_opcode;
    completion.bytes = static_cast<std::uint32_t>(bytes);
    completion.immediate = request.immediate;
    completion.qp_number = peer->number;
    tell(*peer, completion, (request.flags & send_solicited) != 0);
  }
  if (sending.fate == Fate::fine) {
    const long read_us =
        is_read ? static_cast<long>(bytes) * settings["read_us_per_mib"] * pair.context->device->slowness / (1 << 20)
                : 0;
    sending.due = some_time_after(pair.answers.empty() ? Clock::now() : pair.answers.back().due) +
                  std::chrono::microseconds(read_us);
  }
  pair.answers.push_back(std::move(sending));
}

void World::answer(Pair& pair) {
  const Sending sending = std::move(pair.answers.front());
  pair.answers.pop_front();
  if (sending.fate != Fate::fine) return break_off(pair, sending, Status::retries_exceeded);
  const auto peer = pairs.find(pair.attributes.peer_qp);
  const bool is_cut = cut_until(pair) || pair.context->device->is_deaf ||
                      (peer != pairs.end() && peer->second->context->device->is_mute);
  if (is_cut) {  // since it arrived
    pair.answers.push_front(sending);
    pair.answers.front().fate = Fate::unanswered;
    pair.answers.front().due = Clock::now() + std::chrono::milliseconds(settings["retry_ms"]);
    return;
  }
  if (sending.request.opcode == Opcode::rdma_read) {  // as late as can be
    if (!can_answer(pair)) return break_off(pair, sending, Status::retries_exceeded);
    if (!can_read(sending)) return break_off(pair, sending, Status::remote_access);
    region(sending.entry.local_key, sending.entry.address, sending.entry.length, false);
    if ((access[sending.entry.local_key] & access_local_write) == 0) misused("memory is read into that may not be");
    write_read(sending.entry.address, sending.request.remote_address, sending.entry.length);
    read_bytes += sending.entry.length;
    if (is_pinned(sending.request.remote_address, sending.entry.length)) pinned_out_bytes += sending.entry.length;
    if (is_pinned(sending.entry.address, sending.entry.length)) pinned_in_bytes += sending.entry.length;
    if (is_of_gpu(sending.request.remote_address, sending.entry.length)) gpu_out_bytes += sending.entry.length;
    if (is_of_gpu(sending.entry.address, sending.entry.length)) gpu_in_bytes += sending.entry.length;
    device_bytes[static_cast<std::uint32_t>(pair.context->device - devices)] += sending.entry.length;
  }
  ++answered;
  if ((sending.request.flags & send_signaled) == 0) return;
  WorkCompletion completion{};
  completion.id = sending.request.id;
  completion.qp_number = pair.number;
  completion.vendor_error = static_cast<std::uint32_t>(sending.number);  // for poll, which clears it
  push(pair.send_queue, completion);
}

void World::run() {
  std::unique_lock lock(mutex);
  while (true) {
    const auto now = Clock::now();
    auto next = now + std::chrono::hours(1);
    std::vector<std::pair<Pair*, bool>> ready;
    for (Device& device : devices) {
      if (device.up_at <= now) set_down(device, false);
      next = std::min(next, device.up_at);
    }
    for (const auto& [number, pair] : pairs) {
      const auto look = [&](const std::deque<Sending>& sendings, bool is_answer) {
        if (sendings.empty()) return;
        if (sendings.front().due <= now)
          ready.emplace_back(pair, is_answer);
        else
          next = std::min(next, sendings.front().due);
      };
      // What is lost holds up what follows, and so does a port that is down, while who sends tries again.
      const bool is_stuck = !pair->answers.empty() && pair->answers.back().fate == Fate::lost;
      const auto cut = cut_until(*pair);
      const bool is_tried_again = cut && *cut > now;
      if (is_tried_again) next = std::min(next, *cut);
      // What is fenced waits for the reads before it.
      const bool is_fenced = !pair->sends.empty() && (pair->sends.front().request.flags & send_fence) != 0 &&
                             std::ranges::any_of(pair->answers, [](const Sending& sending) {
                               return sending.request.opcode == Opcode::rdma_read;
                             });
      if (!is_stuck && !is_tried_again && !is_fenced) look(pair->sends, false);
      if (!is_tried_again) look(pair->answers, true);
      tell_arrived(*pair, now);
      if (!pair->arrived.empty()) next = std::min(next, pair->arrived.front().due);
      if (pair->state != QpState::error || (pair->receives.empty() && pair->arrived.empty())) continue;
      if (pair->flush_at <= now)
        flush_receives(*pair);
      else
        next = std::min(next, pair->flush_at);
    }
    if (!stragglers.empty() && stragglers.front().due <= now) {
      const Straggler late = std::move(stragglers.front());
      stragglers.pop_front();
      arrive(late);
      continue;
    }
    if (!stragglers.empty()) next = std::min(next, stragglers.front().due);
    if (ready.empty()) {
      changed.wait_until(lock, next);
      continue;
    }
    const auto [pair, is_answer] = ready[random() % ready.size()];
    if (is_answer)
      answer(*pair);
    else
      carry_out(*pair);
  }
}

int poll_queue(CompletionQueue* of, int count, WorkCompletion* completions) {
  const std::lock_guard lock(world().mutex);
  Queue& queue = *static_cast<Queue*>(of);
  int taken = 0;
  while (taken < count && !queue.completions.empty()) {
    completions[taken] = queue.completions.front();
    queue.completions.pop_front();
    if (const auto found = world().pairs.find(completions[taken].qp_number);
        found != world().pairs.end() && found->second->send_queue == of)
      found->second->retired = std::max<std::uint64_t>(found->second->retired, completions[taken].vendor_error);
    completions[taken++].vendor_error = 0;
  }
  return taken;
}

// What was asked for before holds if it is more.
int request_notification(CompletionQueue* of, int only_solicited) {
  const std::lock_guard lock(world().mutex);
  Queue& queue = *static_cast<Queue*>(of);
  queue.is_for_solicited = only_solicited != 0 && (!queue.is_armed || queue.is_for_solicited);
  queue.is_armed = true;
  return 0;
}

int post_send(QueuePair* to, SendRequest* request, SendRequest** failed) {
  const std::lock_guard lock(world().mutex);
  Pair& pair = *static_cast<Pair*>(to);
  ++world().posts;
  for (; request != nullptr; request = request->next) {
    *failed = request;
    if (pair.state != QpState::ready_to_send && pair.state != QpState::error) return EINVAL;
    if (pair.posted - pair.retired >= pair.capacity.sends) misused("a send queue overflows");
    Sending sending;
    sending.request = *request;
    sending.number = ++pair.posted;
    ++world().posted;
    sending.due = world().some_time_after(pair.sends.empty() ? Clock::now() : pair.sends.back().due);
    if (request->entry_count > 1) misused("more entries than the queue pair was made for");
    if (request->entry_count > 0) sending.entry = request->entries[0];
    if ((request->flags & send_inline) != 0) {
      if (sending.entry.length > pair.capacity.inline_bytes) misused("more bytes inline than the queue pair takes");
      const auto* from = reinterpret_cast<const std::byte*>(sending.entry.address);
      sending.bytes.assign(from, from + sending.entry.length);
    } else if (request->entry_count > 0) {
      world().region(sending.entry.local_key, sending.entry.address, sending.entry.length, false);
    }
    if (pair.state == QpState::error) {
      WorkCompletion completion{};
      completion.id = request->id;
      completion.status = Status::flushed;
      completion.qp_number = pair.number;
      world().push(pair.send_queue, completion);
      continue;
    }
    pair.sends.push_back(std::move(sending));
  }
  world().changed.notify_one();
  return 0;
}

int post_receive(QueuePair* to, ReceiveRequest* request, ReceiveRequest** failed) {
  const std::lock_guard lock(world().mutex);
  Pair& pair = *static_cast<Pair*>(to);
  for (; request != nullptr; request = request->next) {
    *failed = request;
    if (pair.state == QpState::reset) return EINVAL;
    if (pair.receives.size() >= pair.capacity.receives) misused("a receive queue overflows");
    pair.receives.push_back(request->id);
  }
  return 0;
}

template <class Object>
Object* counted(Object* object) {
  ++world().objects;
  return object;
}

template <class Object>
int destroyed(Object* object) {
  --world().objects;
  delete object;
  return 0;
}

long read_counter(long World::* counter) {
  const std::lock_guard lock(world().mutex);
  return world().*counter;
}

}  // namespace

extern "C" {

void fake_verbs_set(const char* name, long value) {
  const std::lock_guard lock(world().mutex);
  if (std::strcmp(name, "seed") == 0)
    world().random.seed(static_cast<unsigned>(value));
  else if (std::strcmp(name, "slow_device") == 0)
    devices[value].slowness *= 2;
  else if (std::strcmp(name, "port_down") == 0)
    world().set_down(devices[value], true);
  else if (std::strcmp(name, "port_up") == 0)
    world().set_down(devices[value], false);
  else if (std::strcmp(name, "device_fatal") == 0)
    devices[value].is_deaf = true, world().raise(devices[value], EventType::device_fatal, 0);
  else if (std::strcmp(name, "pairs_fatal") == 0)
    world().raise_for_pairs(devices[value]);
  else if (std::strcmp(name, "heal") == 0)
    for (Device& device : devices) {
      device.is_deaf = device.is_mute = device.is_down = false;
      device.slowness = 1;
      device.up_at = Clock::time_point::max();
    }
  else
    world().settings.at(name) = value;
}

long fake_verbs_device_bytes(int device) {
  const std::lock_guard lock(world().mutex);
  return world().device_bytes[static_cast<std::uint32_t>(device)];
}

long fake_verbs_objects() { return read_counter(&World::objects); }
long fake_verbs_posted() { return read_counter(&World::posted); }
long fake_verbs_posts() { return read_counter(&World::posts); }
long fake_verbs_answered() { return read_counter(&World::answered); }
long fake_verbs_read_bytes() { return read_counter(&World::read_bytes); }
long fake_verbs_pinned_out_bytes() { return read_counter(&World::pinned_out_bytes); }
long fake_verbs_pinned_in_bytes() { return read_counter(&World::pinned_in_bytes); }
long fake_verbs_gpu_out_bytes() { return read_counter(&World::gpu_out_bytes); }
long fake_verbs_gpu_in_bytes() { return read_counter(&World::gpu_in_bytes); }
int fake_verbs_uses(const void* begin, std::size_t bytes) {
  const std::lock_guard lock(world().mutex);
  return world().is_used(reinterpret_cast<std::uint64_t>(begin), bytes) ? 1 : 0;
}
int fake_verbs_is_registered(const void* begin, std::size_t bytes) {
  const std::lock_guard lock(world().mutex);
  const auto* const first = static_cast<const std::byte*>(begin);
  const bool is_any = std::ranges::any_of(world().regions, [&](const auto& numbered) {
    const auto* const from = static_cast<const std::byte*>(numbered.second->address);
    return from < first + bytes && first < from + numbered.second->length;
  });
  return is_any ? 1 : 0;
}
long fake_verbs_registrations() { return read_counter(&World::registrations); }
long fake_verbs_registered_bytes() { return read_counter(&World::registered_bytes); }
long fake_verbs_events() { return read_counter(&World::events); }
long fake_verbs_told() { return read_counter(&World::told); }
long fake_verbs_untold() { return read_counter(&World::untold); }

int ibv_is_fork_initialized() {
  const std::lock_guard lock(world().mutex);
  return static_cast<int>(world().settings["fork_state"]);
}

Device** ibv_get_device_list(int* count) {
  *count = static_cast<int>(std::size(devices));
  auto** const list = new Device* [std::size(devices) + 1] {};
  for (std::size_t i = 0; i < std::size(devices); ++i) list[i] = &devices[i];
  return list;
}

void ibv_free_device_list(Device** list) { delete[] list; }

const char* ibv_get_device_name(Device* device) { return device->name; }

Context* ibv_open_device(Device* device) {
  const std::lock_guard lock(world().mutex);
  auto* const context = counted(new OpenContext{});
  context->device = device;
  context->operations.poll = poll_queue;
  context->operations.request_notification = request_notification;
  context->operations.post_send = post_send;
  context->operations.post_receive = post_receive;
  context->command_fd = ::eventfd(0, EFD_CLOEXEC);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) misused("no pipe");
  context->async_fd = ends[0];
  context->event_write_end = ends[1];
  world().contexts.push_back(context);
  return context;
}

int ibv_close_device(Context* of) {
  const std::lock_guard lock(world().mutex);
  auto* const context = static_cast<OpenContext*>(of);
  std::erase(world().contexts, context);
  ::close(context->command_fd);
  ::close(context->async_fd);
  ::close(context->event_write_end);
  return destroyed(context);
}

int ibv_query_port(Context* context, std::uint8_t port, PortAttributes* attributes) {
  const std::lock_guard lock(world().mutex);
  if (port != 1) return EINVAL;
  *attributes = {};
  const bool is_gone = (context->device->is_deaf && context->device->is_mute) || context->device->is_down;
  attributes->state = world().settings["port_active"] != 0 && !is_gone ? port_active : port_down;
  attributes->max_mtu = attributes->active_mtu = 3;
  attributes->gid_count = 2;
  attributes->pkey_count = 1;
  const bool is_infiniband = context->device - devices == world().settings["infiniband_device"];
  attributes->link_layer = is_infiniband ? link_infiniband : link_ethernet;
  return 0;
}

int ibv_query_gid(Context* context, std::uint8_t, int index, Gid* gid) {
  if (index > 1) return EINVAL;
  *gid = {};
  if (index == 0) std::memcpy(gid->bytes, "\xfe\x80", 2);
  if (index == 1) std::memcpy(gid->bytes + 10, "\xff\xff\x0a", 3);
  gid->bytes[15] = static_cast<std::uint8_t>(1 + (context->device - devices));
  return 0;
}

int ibv_query_pkey(Context*, std::uint8_t, int index, std::uint16_t* pkey) {
  *pkey = 0xffff;
  return index == 0 ? 0 : EINVAL;
}

ProtectionDomain* ibv_alloc_pd(Context* context) {
  const std::lock_guard lock(world().mutex);
  return counted(new ProtectionDomain{context, 0});
}

int ibv_dealloc_pd(ProtectionDomain* domain) {
  const std::lock_guard lock(world().mutex);
  return destroyed(domain);
}

MemoryRegion* ibv_reg_mr(ProtectionDomain* domain, void* address, std::size_t length, int access) {
  const std::lock_guard lock(world().mutex);
  if (is_of_gpu(reinterpret_cast<std::uint64_t>(address), 1) && world().settings["peermem"] == 0) {
    errno = EFAULT;
    return nullptr;
  }
  const long limit = world().settings["memory_limit"];
  const long limited = world().settings["limited_device"];
  const bool is_limited = limited < 0 || domain->context->device == &devices[limited];
  if (limit >= 0 && is_limited && world().registered_bytes + static_cast<long>(length) > limit) {
    errno = ENOMEM;
    return nullptr;
  }
  world().registered_bytes += static_cast<long>(length);
  ++world().registrations;
  const std::uint32_t key = world().next_number += 2;
  auto* const region = counted(new MemoryRegion{domain->context, domain, address, length, 0, key, key + 1});
  world().regions[key] = world().regions[key + 1] = region;
  world().access[key] = world().access[key + 1] = access;
  return region;
}

// It locks no memory.
MemoryRegion* ibv_reg_dmabuf_mr(ProtectionDomain* domain, std::uint64_t offset, std::size_t length,
                                std::uint64_t address, int fd, int access) {
  const std::lock_guard lock(world().mutex);
  std::uint64_t exported[2] = {};
  if (::pread(fd, exported, sizeof exported, 0) != sizeof exported) misused("what is registered is no dma-buf");
  if (exported[0] + offset != address || offset + length > exported[1]) misused("bytes beyond an exported range");
  if (world().settings["dmabuf"] == 0) {
    errno = EOPNOTSUPP;
    return nullptr;
  }
  ++world().registrations;
  world().registered_bytes += static_cast<long>(length);
  const std::uint32_t key = world().next_number += 2;
  auto* const begin = reinterpret_cast<void*>(address);
  auto* const region = counted(new MemoryRegion{domain->context, domain, begin, length, 0, key, key + 1});
  world().regions[key] = world().regions[key + 1] = region;
  world().access[key] = world().access[key + 1] = access;
  return region;
}

int ibv_dereg_mr(MemoryRegion* region) {
  const std::lock_guard lock(world().mutex);
  if (world().is_used(region->local_key)) misused("memory is withdrawn that a request uses");
  world().registered_bytes -= static_cast<long>(region->length);
  world().regions.erase(region->local_key);
  world().regions.erase(region->remote_key);
  return destroyed(region);
}

CompletionChannel* ibv_create_comp_channel(Context* context) {
  const std::lock_guard lock(world().mutex);
  auto* const channel = counted(new Channel{});
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) misused("no pipe");
  channel->context = context;
  channel->fd = ends[0];
  channel->write_end = ends[1];
  return channel;
}

int ibv_destroy_comp_channel(CompletionChannel* of) {
  const std::lock_guard lock(world().mutex);
  auto* const channel = static_cast<Channel*>(of);
  if (channel->queues != 0) misused("a completion channel is destroyed before its queues");
  ::close(channel->fd);
  ::close(channel->write_end);
  return destroyed(channel);
}

CompletionQueue* ibv_create_cq(Context* context, int capacity, void* owner, CompletionChannel* channel, int) {
  const std::lock_guard lock(world().mutex);
  auto* const queue = counted(new Queue{});
  queue->context = context;
  queue->channel = channel;
  queue->owner = owner;
  queue->capacity = capacity;
  ++static_cast<Channel*>(channel)->queues;
  return queue;
}

int ibv_destroy_cq(CompletionQueue* of) {
  const std::lock_guard lock(world().mutex);
  auto* const queue = static_cast<Queue*>(of);
  if (queue->pairs != 0) misused("a completion queue is destroyed before its queue pairs");
  // A real one waits for ever for an event that was taken and not acknowledged; one nobody took is withdrawn.
  --static_cast<Channel*>(queue->channel)->queues;
  return destroyed(queue);
}

int ibv_get_cq_event(CompletionChannel* channel, CompletionQueue** queue, void** owner) {
  void* pointer = nullptr;
  if (::read(channel->fd, &pointer, sizeof pointer) != sizeof pointer) return -1;
  *queue = static_cast<Queue*>(pointer);
  *owner = (*queue)->owner;
  return 0;
}

void ibv_ack_cq_events(CompletionQueue* queue, unsigned count) {
  const std::lock_guard lock(world().mutex);
  static_cast<Queue*>(queue)->unacknowledged -= count;
}

int ibv_get_async_event(Context* context, AsyncEvent* event) {
  char byte = 0;
  if (::read(context->async_fd, &byte, 1) != 1) return -1;
  const std::lock_guard lock(world().mutex);
  auto& events = static_cast<OpenContext*>(context)->events;
  if (events.empty()) {  // it was of a queue pair that has ended since
    errno = EAGAIN;
    return -1;
  }
  *event = events.front();
  events.pop_front();
  if (event->type == EventType::qp_fatal) ++static_cast<Pair*>(event->of.pair)->untold;
  ++world().untold;
  return 0;
}

void ibv_ack_async_event(AsyncEvent* event) {
  const std::lock_guard lock(world().mutex);
  --world().untold;
  ++world().told;
  if (event->type == EventType::qp_fatal) --static_cast<Pair*>(event->of.pair)->untold;
}

QueuePair* ibv_create_qp(ProtectionDomain* domain, QpSetup* setup) {
  const std::lock_guard lock(world().mutex);
  if (setup->type != reliable_connected ||
      static_cast<long>(setup->capacity.inline_bytes) > world().settings["inline_limit"]) {
    errno = EINVAL;
    return nullptr;
  }
  auto* const pair = counted(new Pair{});
  pair->context = domain->context;
  pair->domain = domain;
  pair->send_queue = setup->send_queue;
  pair->receive_queue = setup->receive_queue;
  pair->number = ++world().next_number;
  pair->capacity = setup->capacity;
  ++static_cast<Queue*>(setup->send_queue)->pairs;
  ++static_cast<Queue*>(setup->receive_queue)->pairs;
  world().pairs[pair->number] = pair;
  return pair;
}

int ibv_modify_qp(QueuePair* of, QpAttributes* attributes, int mask) {
  const std::lock_guard lock(world().mutex);
  Pair& pair = *static_cast<Pair*>(of);
  if (mask == set_state && attributes->state == QpState::error) {
    pair.state = QpState::error;
    world().flush(pair);
    return 0;
  }
  const auto follows = [&](QpState from, QpState to, int needed) {
    return pair.state == from && attributes->state == to && mask == (needed | set_state);
  };
  const bool is_right =
      follows(QpState::reset, QpState::init, set_port | set_pkey_index | set_access) ||
      follows(QpState::init, QpState::ready_to_receive,
              set_address | set_path_mtu | set_peer_qp | set_receive_psn | set_max_peer_reads | set_min_rnr_timer) ||
      follows(QpState::ready_to_receive, QpState::ready_to_send,
              set_send_psn | set_timeout | set_retries | set_rnr_retries | set_max_reads);
  if (!is_right) return EINVAL;
  if ((mask & set_peer_qp) != 0) pair.attributes.peer_qp = attributes->peer_qp;
  pair.state = attributes->state;
  return 0;
}

int ibv_destroy_qp(QueuePair* of) {
  const std::lock_guard lock(world().mutex);
  auto* const pair = static_cast<Pair*>(of);
  world().pairs.erase(pair->number);
  // Events that nobody took are withdrawn; for those that were a real one waits until they are acknowledged.
  std::erase_if(static_cast<OpenContext*>(pair->context)->events,
                [&](const AsyncEvent& event) { return event.type == EventType::qp_fatal && event.of.pair == pair; });
  if (pair->untold != 0) misused("a queue pair is destroyed before its events are acknowledged");
  --static_cast<Queue*>(pair->send_queue)->pairs;
  --static_cast<Queue*>(pair->receive_queue)->pairs;
  return destroyed(pair);
}

const char* ibv_wc_status_str(Status status) {
  return status == Status::retries_exceeded ? "transport retry counter exceeded" : "some status";
}

}  // extern "C"
