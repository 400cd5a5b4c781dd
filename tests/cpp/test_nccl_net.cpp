// The network plugin (csrc/nccl_net) under the calls that NCCL makes, in NCCL's order, by two processes and more.
//
// What NCCL does (2.20 to 2.30, its init, net transport and proxy):
//   once, and with versions 11 and 12 again for each communicator: init, then once devices; getProperties of each
//   device as often as it likes
//   the receiving rank, for each channel: listen; its handle goes to the sending rank by NCCL's own bootstrap
//   the proxy's service thread of each: connect or accept, again and again until there is a connection; a handle that
//   connect gets is one copy in one place until then. Then closeListen, and regMr of the channel's buffers
//   the proxy's progress thread: irecv of up to eight slots ahead, each with the slot's whole size; isend of a slot
//   when the GPU has filled it, with what is in it; test of the oldest message only, sends and receives of all channels
//   in turn, and sched_yield after a round in which none was posted or done. The tag is the sender's rank
//   at the end deregMr, closeSend, closeRecv; finalize (versions 11 and 12) when
//   a call fails: no further call but the closing ones, also with messages under way; a communicator that is made again
//   begins at init
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "check.hpp"
#include "holmes/transport/socket.hpp"
#include "namespaces.hpp"
#include "nccl_net/abi.hpp"
#include "nccl_net/network.hpp"

using namespace holmes;
using namespace holmes::test;
using namespace holmes::nccl_net;
using namespace std::chrono_literals;

namespace {

// --- NCCL's log ---

std::mutex log_mutex;
std::string logged;

void log_of_nccl(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::lock_guard lock(log_mutex);
  logged += (level == log_warn ? "WARN " : "INFO ") + std::string(text) + "\n";
  if (std::getenv("TEST_SHOW_LOG")) std::fprintf(stderr, "%s\n", text);
}

bool log_has(const std::string& part) {
  std::lock_guard lock(log_mutex);
  return contains(logged, part);
}

// --- one interface for all versions, as NCCL has it ---

struct Properties {
  std::string name;
  int pointer_support, speed_mbps, max_receives, port;
};

struct Net {
  const char* name = nullptr;
  std::function<Result()> init;
  std::function<Result(int*)> devices;
  std::function<Result(int, Properties*)> properties;
  std::function<Result(int, void*, void**)> listen;
  std::function<Result(int, void*, void**)> connect;
  std::function<Result(void*, void*, std::size_t, int, void**)> send;
  std::function<Result(void*, int, void**, std::size_t*, int*, void**)> receive;
  Middle middle{};
  End end{};
};

template <typename Raw>
Properties properties_of(const Raw& raw) {
  return {raw.name, raw.pointer_support, raw.speed_mbps, raw.max_receives, raw.port};
}
Properties properties_of(const PropertiesV11& raw) { return properties_of(raw.base); }
Properties properties_of(const PropertiesV12& raw) { return properties_of(raw.base); }

template <typename Raw, typename Plugin>
void bind_common(Net& net, const Plugin& plugin) {
  net.name = plugin.name;
  net.devices = plugin.devices;
  net.properties = [&plugin](int device, Properties* properties) {
    Raw raw;
    const Result result = plugin.get_properties(device, &raw);
    if (result == success) *properties = properties_of(raw);
    return result;
  };
  net.middle = plugin.middle;
  net.end = plugin.end;
}

template <typename Plugin>
void bind_with_sizes(Net& net, const Plugin& plugin) {
  net.send = [&plugin](void* connection, void* data, std::size_t bytes, int tag, void** request) {
    if constexpr (std::is_same_v<Plugin, PluginV9>)
      return plugin.send(connection, data, bytes, tag, nullptr, request);
    else
      return plugin.send(connection, data, bytes, tag, nullptr, nullptr, request);
  };
  net.receive = [&plugin](void* connection, int count, void** data, std::size_t* sizes, int* tags, void** request) {
    void* none[8] = {};
    if constexpr (std::is_same_v<Plugin, PluginV9>)
      return plugin.receive(connection, count, data, sizes, tags, none, request);
    else
      return plugin.receive(connection, count, data, sizes, tags, none, none, request);
  };
}

template <typename Plugin>
void bind_with_context(Net& net, const Plugin& plugin, std::uint64_t comm_id) {
  const auto context = std::make_shared<void*>();
  net.init = [&plugin, context, comm_id] {
    CommConfig config{no_id};
    return plugin.init(context.get(), comm_id, &config, log_of_nccl, nullptr);
  };
  net.listen = [&plugin, context](int device, void* handle, void** listener) {
    return plugin.listen(*context, device, handle, listener);
  };
  net.connect = [&plugin, context](int device, void* handle, void** connection) {
    return plugin.connect(*context, device, handle, connection, nullptr);
  };
  bind_with_sizes(net, plugin);
}

void* plugin_library() {
  const char* other = std::getenv("TEST_PLUGIN");  // to measure another one
  static void* const library = ::dlopen(other ? other : NCCL_NET_PLUGIN_FILE, RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "%s\n", ::dlerror()), std::abort();
  return library;
}

template <typename Plugin>
const Plugin& table(const std::string& version) {
  const auto* found = static_cast<const Plugin*>(::dlsym(plugin_library(), ("ncclNetPlugin_v" + version).c_str()));
  if (!found) std::fprintf(stderr, "%s\n", ::dlerror()), std::abort();
  return *found;
}

// `comm_id`: of the communicator of NCCL that it is for.
Net load(int version, std::uint64_t comm_id = 0x1234) {
  Net net;
  if (version == 8) {
    const auto& plugin = table<PluginV8>("8");
    bind_common<PropertiesV8>(net, plugin);
    net.init = [&plugin] { return plugin.init(log_of_nccl); };
    net.listen = plugin.listen;
    net.connect = [&plugin](int device, void* handle, void** connection) {
      return plugin.connect(device, handle, connection, nullptr);
    };
    net.send = [&plugin](void* connection, void* data, std::size_t bytes, int tag, void** request) {
      return plugin.send(connection, data, static_cast<int>(bytes), tag, nullptr, request);
    };
    net.receive = [&plugin](void* connection, int count, void** data, std::size_t* sizes, int* tags, void** request) {
      void* none[8] = {};
      int narrow[8] = {};
      for (int i = 0; i < count; ++i) narrow[i] = static_cast<int>(sizes[i]);
      return plugin.receive(connection, count, data, narrow, tags, none, request);
    };
  } else if (version == 9) {
    const auto& plugin = table<PluginV9>("9");
    bind_common<PropertiesV9>(net, plugin);
    net.init = [&plugin] { return plugin.init(log_of_nccl); };
    net.listen = plugin.listen;
    net.connect = [&plugin](int device, void* handle, void** connection) {
      return plugin.connect(device, handle, connection, nullptr);
    };
    bind_with_sizes(net, plugin);
  } else if (version == 10) {
    const auto& plugin = table<PluginV10>("10");
    bind_common<PropertiesV9>(net, plugin);
    net.init = [&plugin] { return plugin.init(log_of_nccl, nullptr); };
    net.listen = plugin.listen;
    net.connect = [&plugin](int device, void* handle, void** connection) {
      CommConfig config{no_id};
      return plugin.connect(device, &config, handle, connection, nullptr);
    };
    bind_with_sizes(net, plugin);
  } else if (version == 11) {
    bind_common<PropertiesV11>(net, table<PluginV11>("11"));
    bind_with_context(net, table<PluginV11>("11"), comm_id);
  } else {
    bind_common<PropertiesV12>(net, table<PluginV12>("12"));
    bind_with_context(net, table<PluginV12>("12"), comm_id);
  }
  return net;
}

// --- a rank: what NCCL's threads do ---

// NCCL keeps a handle where it likes.
struct OddHandle {
  char before = 0;
  char bytes[handle_bytes] = {};
};

constexpr int slot_count = 8;  // of a channel, NCCL_STEPS

// A message's bytes, different for every one. Copied from one block: bytes written one by one take the thread sanitizer
// longer than all of their way.
void fill(std::vector<unsigned char>& bytes, std::size_t count, int channel, int number) {
  constexpr std::size_t period = 64 * 1024;
  static const std::vector<unsigned char> block = [] {
    std::vector<unsigned char> values(2 * period);
    for (std::size_t i = 0; i < period; ++i) values[i] = static_cast<unsigned char>((i >> 8) * 31 + i * 7);
    std::copy_n(values.begin(), period, values.begin() + period);
    return values;
  }();
  const std::size_t from = static_cast<std::size_t>(channel * 5923 + number * 13007) % period;
  for (std::size_t done = 0; done < count; done += period)
    std::memcpy(bytes.data() + done, block.data() + from, std::min(period, count - done));
}

std::size_t size_of(std::size_t slot_bytes, int channel, int number) {
  const std::size_t sizes[] = {slot_bytes, 0, 1, 4095, slot_bytes / 2 + 1, 64 * 1024, 17, slot_bytes - 1};
  return std::min(sizes[static_cast<std::size_t>(number * 5 + channel) % std::size(sizes)], slot_bytes);
}

// One rank of several. `bootstrap`: a socket to each rank, in place of NCCL's; to itself -1.
class Rank {
public:
  Rank(Net net, int rank, std::vector<int> bootstrap)
      : net_(std::move(net)), rank_(rank), bootstrap_(std::move(bootstrap)) {
    for (int peer = 0; peer < static_cast<int>(bootstrap_.size()); ++peer)
      if (peer != rank_) peers_.push_back(peer);
  }

  void init() {
    CHECK(net_.init() == success);
    int count = 0;
    CHECK(net_.devices(&count) == success && count == 1);
    Properties properties;
    CHECK(net_.properties(0, &properties) == success);
    CHECK(properties.pointer_support == pointer_to_host && properties.max_receives == 1);
  }

  // `channels` to and from each other rank.
  Result connect(int channels, std::size_t slot_bytes) {
    slot_bytes_ = slot_bytes;
    channels_ = static_cast<std::size_t>(channels);
    std::vector<OddHandle> handles(channels_ * peers_.size());
    std::vector<void*> listeners(handles.size());
    for (std::size_t i = 0; i < handles.size(); ++i)
      if (const Result result = net_.listen(0, handles[i].bytes, &listeners[i]); result != success) return result;
    for (std::size_t i = 0; i < handles.size(); ++i) exchange(peer_of(i), handles[i].bytes, handle_bytes);
    sends_.resize(handles.size());
    receives_.resize(handles.size());
    for (bool all = false; !all;) {
      all = true;
      for (std::size_t i = 0; i < handles.size(); ++i) {
        if (!sends_[i].connection)
          if (const Result result = net_.connect(0, handles[i].bytes, &sends_[i].connection); result != success)
            return close_listeners(listeners), result;
        if (!receives_[i].connection)
          if (const Result result = net_.middle.accept(listeners[i], &receives_[i].connection, nullptr);
              result != success)
            return close_listeners(listeners), result;
        all = all && sends_[i].connection && receives_[i].connection;
      }
    }
    close_listeners(listeners);
    for (auto* side : {&sends_, &receives_})
      for (Channel& channel : *side) {
        // What nobody looks at may lie in one place.
        const std::size_t most = (std::size_t{32} << 20) / slot_bytes;
        channel.slots.resize(checks_ ? slot_count : std::clamp<std::size_t>(most, 1, slot_count));
        for (auto& slot : channel.slots) {
          slot.resize(slot_bytes);
          void* registration = nullptr;
          CHECK(net_.middle.register_memory(channel.connection, slot.data(), slot_bytes, pointer_to_host,
                                            &registration) == success);
        }
      }
    return success;
  }

  // Until `messages` went over each channel, a call fails, or `goes_on`, which sees the number of each that came, is
  // false.
  using GoesOn = std::function<bool(int)>;
  Result transfer(int messages, const GoesOn& goes_on = nullptr, bool is_duplex = true) {
    stopped_ = false;
    const auto deadline = Clock::now() + 60s;
    for (bool all = false; !all && !stopped_;) {
      CHECK(Clock::now() < deadline);
      if (Clock::now() >= deadline) return internal_error;
      all = true;
      is_idle_ = true;
      for (std::size_t i = 0; i < sends_.size(); ++i) {
        if (is_duplex || rank_ == 1)
          if (const Result result = push(i, messages, all); result != success) return result;
        if (is_duplex || rank_ == 0)
          if (const Result result = pull(i, messages, all, goes_on); result != success) return result;
      }
      if (is_idle_) ::sched_yield();
    }
    return success;
  }

  // Full slots from now on, whose bytes nobody looks at.
  void measure() { checks_ = false; }

  void close() {
    for (Channel& channel : sends_)
      if (channel.connection) CHECK(net_.end.close_send(channel.connection) == success);
    for (Channel& channel : receives_)
      if (channel.connection) CHECK(net_.end.close_receive(channel.connection) == success);
    sends_.clear();
    receives_.clear();
  }

  // Gives `bytes` to the peer and takes its own: a barrier of the two.
  void exchange(int peer, void* bytes, std::size_t count) const {
    const int fd = bootstrap_[static_cast<std::size_t>(peer)];
    CHECK(::send(fd, bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
    CHECK(::recv(fd, bytes, count, MSG_WAITALL) == static_cast<ssize_t>(count));
  }
  // Of all ranks but `dead`.
  void barrier(int dead = -1) const {
    for (const int peer : peers_) {
      char byte = 0;
      if (peer != dead) exchange(peer, &byte, 1);
    }
  }

  Net& net() { return net_; }
  int rank() const { return rank_; }
  const std::vector<int>& peers() const { return peers_; }
  const std::vector<int>& bootstrap() const { return bootstrap_; }
  std::vector<unsigned char>& received_slot(int channel, int slot) {
    return receives_[static_cast<std::size_t>(channel)].slot(slot);
  }

private:
  struct Channel {
    void* connection = nullptr;
    std::vector<std::vector<unsigned char>> slots;
    std::vector<unsigned char>& slot(int number) { return slots[static_cast<std::size_t>(number) % slots.size()]; }
    std::deque<void*> requests;
    int posted = 0, done = 0;
  };

  void close_listeners(std::vector<void*>& listeners) {
    for (void* listener : listeners) CHECK(net_.end.close_listener(listener) == success);
  }

  // Of a channel, in the order of the peers and of each one's channels; and its number among these.
  int peer_of(std::size_t channel) const { return peers_[channel / channels_]; }
  int number_of(std::size_t channel) const { return static_cast<int>(channel % channels_); }
  static int pattern(int from, int to, int number) { return 100 * from + 10 * to + number; }

  Result push(std::size_t index, int messages, bool& all) {
    Channel& channel = sends_[index];
    const int number = number_of(index);
    if (channel.posted < messages && channel.posted - channel.done < slot_count) {
      auto& slot = channel.slot(channel.posted);
      const std::size_t bytes = size(number, channel.posted);
      if (checks_) fill(slot, bytes, pattern(rank_, peer_of(index), number), channel.posted);
      void* request = nullptr;
      if (const Result result = net_.send(channel.connection, slot.data(), bytes, rank_, &request); result != success)
        return result;
      if (request) channel.requests.push_back(request), ++channel.posted, is_idle_ = false;
    }
    if (!channel.requests.empty()) {
      int done = 0, moved = 0;
      if (const Result result = net_.end.test(channel.requests.front(), &done, &moved); result != success)
        return result;
      if (done) {
        CHECK(static_cast<std::size_t>(moved) == size(number, channel.done));
        channel.requests.pop_front(), ++channel.done, is_idle_ = false;
      }
    }
    all = all && channel.done == messages;
    return success;
  }

  Result pull(std::size_t index, int messages, bool& all, const GoesOn& goes_on) {
    Channel& channel = receives_[index];
    while (channel.posted < messages && channel.posted - channel.done < slot_count) {
      auto& slot = channel.slot(channel.posted);
      void* data = slot.data();
      std::size_t most = slot_bytes_;
      int tag = peer_of(index);
      void* request = nullptr;
      if (const Result result = net_.receive(channel.connection, 1, &data, &most, &tag, &request); result != success)
        return result;
      if (!request) break;
      channel.requests.push_back(request), ++channel.posted, is_idle_ = false;
    }
    if (!channel.requests.empty()) {
      int done = 0;
      int sizes[8] = {};
      if (const Result result = net_.end.test(channel.requests.front(), &done, sizes); result != success) return result;
      if (done) {
        check_message(channel, index, static_cast<std::size_t>(sizes[0]));
        channel.requests.pop_front(), ++channel.done, is_idle_ = false;
        stopped_ = stopped_ || (goes_on && !goes_on(channel.done));
      }
    }
    all = all && channel.done == messages;
    return success;
  }

  std::size_t size(int channel, int number) const {
    return checks_ ? size_of(slot_bytes_, channel, number) : slot_bytes_;
  }

  void check_message(Channel& channel, std::size_t index, std::size_t bytes) const {
    const int number = number_of(index);
    CHECK(bytes == size(number, channel.done));
    if (!checks_) return;
    std::vector<unsigned char> expected(slot_bytes_);
    fill(expected, bytes, pattern(peer_of(index), rank_, number), channel.done);
    CHECK(std::memcmp(channel.slot(channel.done).data(), expected.data(), bytes) == 0);
  }

  Net net_;
  const int rank_;
  const std::vector<int> bootstrap_;
  std::vector<int> peers_;
  std::size_t channels_ = 0;
  std::size_t slot_bytes_ = 0;
  bool stopped_ = false, is_idle_ = false;
  bool checks_ = true;
  std::vector<Channel> sends_, receives_;
};

// --- what the ranks do, by name; each in a process of its own ---

void whole_life(Rank& rank, int channels, std::size_t slot_bytes, int messages) {
  rank.init();
  CHECK(rank.connect(channels, slot_bytes) == success);
  CHECK(rank.transfer(messages) == success);
  rank.barrier();
  rank.close();
}

void exchange_much(Rank& rank) {
  whole_life(rank, 2, 4 << 20, 20);
  CHECK(log_has("INFO NET/holmes : using "));
  for (const int peer : rank.peers())
    CHECK(log_has("NET/holmes : receives from rank " + std::to_string(peer) + " (host "));
}

// As many messages under way as NCCL may have.
void many_at_once(Rank& rank) { whole_life(rank, 8, 16 << 10, 200); }

// A communicator of NCCL, and another one after its end.
void exchange_twice(Rank& rank) {
  whole_life(rank, 2, 256 << 10, 40);
  whole_life(rank, 1, 64 << 10, 100);
}

void rails(Rank& rank) {
  whole_life(rank, 2, 1 << 20, 60);
  CHECK(log_has("10.1.0.") && log_has("10.2.0."));
}

Result assign(std::uint64_t comm_id, const char* nics) {
  using Assign = Result(std::uint64_t, const char*);
  return reinterpret_cast<Assign*>(::dlsym(plugin_library(), "holmes_nccl_net_assign"))(comm_id, nics);
}

int uses(std::uint64_t comm_id) {
  return reinterpret_cast<int (*)(std::uint64_t)>(::dlsym(plugin_library(), "holmes_nccl_net_uses"))(comm_id);
}

// What is wrong with these NICs; empty: nothing.
std::string problem_of(const char* nics, std::size_t room = 512) {
  using Check = Result(const char*, char*, std::size_t);
  std::string text(room, '?');
  const auto check = reinterpret_cast<Check*>(::dlsym(plugin_library(), "holmes_nccl_net_check"));
  if (check(nics, text.data(), room) == success) return "";
  return text.substr(0, text.find('\0'));
}

// What left over an interface of this process's network.
std::uint64_t sent_bytes(const std::string& interface) {
  std::ifstream file("/proc/self/net/dev");
  std::string word;
  while (file >> word)
    if (word == interface + ":") break;
  std::uint64_t number = 0;
  for (int i = 0; i < 9; ++i) file >> number;
  CHECK(file.good());
  return number;
}

// Two communicators of one process, each on the NIC that was said for its id.
void two_communicators(Rank& rank) {
  const std::string nics[] = {"r0", "r1"};
  CHECK(assign(1, "class:token-ring") == invalid_usage);
  CHECK(contains(problem_of("class:token-ring"), "token-ring") && contains(problem_of("r7"), "r7"));
  CHECK(problem_of("r7", 5).size() == 4 && problem_of("r7", 0).empty() && problem_of("r0").empty());
  std::vector<std::unique_ptr<Rank>> ranks;
  for (const std::uint64_t id : {0, 1}) {
    CHECK(assign(id, nics[id].c_str()) == success && uses(id) == 0);
    ranks.push_back(std::make_unique<Rank>(load(rank.rank() == 0 ? 11 : 12, id), rank.rank(), rank.bootstrap()));
    ranks.back()->init();
    CHECK(uses(id) == 1);
    CHECK(ranks.back()->connect(2, 256 << 10) == success);
  }
  for (const std::size_t id : {0, 1}) {
    const std::uint64_t own = sent_bytes(nics[id]), other = sent_bytes(nics[1 - id]);
    CHECK(ranks[id]->transfer(60) == success);
    rank.barrier();
    CHECK(sent_bytes(nics[id]) - own > 4'000'000 && sent_bytes(nics[1 - id]) - other < 100'000);
  }
  for (const auto& one : ranks) one->close();
  CHECK(assign(1, "") == success && uses(1) == 0);
}

// What this process writes to stderr from now on.
class OwnStderr {
public:
  OwnStderr() : before_(::dup(STDERR_FILENO)), file_(::memfd_create("stderr", 0)) { ::dup2(file_, STDERR_FILENO); }
  ~OwnStderr() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_), ::close(file_);
  }
  std::string text() const {
    std::string bytes(1 << 16, '\0');
    const ssize_t got = ::pread(file_, bytes.data(), bytes.size(), 0);
    bytes.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    ::dup2(before_, STDERR_FILENO);
    return bytes;
  }

private:
  const int before_, file_;
};

// One of two NICs, TEST_LOST, goes away while messages are under way; for the next test it comes back.
void lost_nic(Rank& rank) {
  const std::string nic = std::getenv("TEST_LOST");
  rank.init();
  CHECK(rank.connect(2, 1 << 20) == success);
  const OwnStderr warnings;
  bool is_down = false;
  const auto result = rank.transfer(100, [&](int number) {
    if (number < 20 || rank.rank() != 0 || is_down) return true;
    is_down = true;
    run("ip link set " + nic + " down");
    return true;
  });
  CHECK(result == success);
  rank.barrier();
  rank.close();
  CHECK(contains(warnings.text(), " lost the connection to rank " + std::to_string(1 - rank.rank()) + " (host "));
  if (rank.rank() == 0) run("ip link set " + nic + " up");
}

void encrypted(Rank& rank) {
  whole_life(rank, 1, 256 << 10, 30);
  CHECK(log_has("(TLS"));
}

// Rank 1 has another secret: it is told so at once, rank 0 when nobody has come in time.
void wrong_secret(Rank& rank) {
  rank.init();
  const auto started = Clock::now();
  CHECK(rank.connect(1, 1024) == remote_error);
  CHECK(Clock::now() - started < 30s);
  CHECK(log_has("WARN NET/holmes : the store at ") && log_has("has another secret"));
  rank.barrier();  // each connects to the other's store, which is gone with its process
}

// The other rank never connects.
void nobody_comes(Rank& rank) {
  rank.init();
  if (rank.rank() == 1) return rank.barrier();
  std::array<char, handle_bytes> handle;
  void* listener = nullptr;
  CHECK(rank.net().listen(0, handle.data(), &listener) == success);
  const auto started = Clock::now();
  Result result = success;
  void* connection = nullptr;
  while (result == success && Clock::now() - started < 30s)
    result = rank.net().middle.accept(listener, &connection, nullptr);
  CHECK(result == remote_error);
  CHECK(log_has("on NIC ") && log_has(": the sending process has not come to ") && log_has(" within 1 s; check that"));
  CHECK(rank.net().end.close_listener(listener) == success);
  rank.barrier();
}

void send_garbage(const Handle& handle, const std::string& garbage) {
  const auto address = SocketAddress::parse(handle.address.data(), static_cast<std::uint16_t>(handle.port));
  const UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(::connect(fd.get(), address.data(), address.length()) == 0);
  ::send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
}

// Strangers at the listening port, before the right one comes.
void garbage(Rank& rank) {
  rank.init();
  Handle handle;
  void* listener = nullptr;
  std::array<char, handle_bytes> raw{};
  CHECK(rank.net().listen(0, raw.data(), &listener) == success);
  std::memcpy(&handle, raw.data(), sizeof handle);
  for (const std::string& text : {std::string("GET / HTTP/1.0\r\n\r\n"), std::string(100'000, '\xff'), std::string()})
    send_garbage(handle, text);
  CHECK(rank.net().end.close_listener(listener) == success);
  CHECK(rank.connect(1, 64 << 10) == success);
  CHECK(rank.transfer(20) == success);
  rank.barrier();
  rank.close();
  // And what is no handle of this plugin.
  const auto refuses = [&](const Handle& wrong, Result expected, const std::string& text) {
    void* connection = nullptr;
    Handle copy = wrong;
    CHECK(rank.net().connect(0, &copy, &connection) == expected && log_has(text));
  };
  Handle wrong;
  std::memset(static_cast<void*>(&wrong), '\x5a', sizeof wrong);
  refuses(wrong, remote_error, "is no handle of this plugin");
  std::memset(static_cast<void*>(&wrong), 0, sizeof wrong);
  refuses(wrong, remote_error, "is no handle of this plugin");
  for (const std::uint32_t port : {0U, 65536U + 80U}) {
    wrong = handle;
    wrong.port = port;
    refuses(wrong, remote_error, "is no handle of this plugin");
  }
  wrong = handle;
  wrong.address = {"localhost"};
  refuses(wrong, remote_error, "is no handle of this plugin");
  // Or notes what another connection's handle does.
  Handle other = handle;
  void* connection = nullptr;
  CHECK(rank.net().connect(0, &other, &connection) == success && connection == nullptr && other.pending != 0);
  wrong = handle;
  wrong.listener += 1;
  wrong.pending = other.pending;
  refuses(wrong, invalid_usage, "with a handle that was changed meanwhile");
}

// Rank 1 is killed in the middle: by the sender's, or the receiver's, end the other one sees it.
void killed(Rank& rank, bool sends) {
  rank.init();
  CHECK(rank.connect(1, 1 << 20) == success);
  int number = 0;
  const auto die = [&](int) {
    if (rank.rank() == 1 && ++number == 10) ::kill(::getpid(), SIGKILL);
    return true;
  };
  std::thread killer;
  if (rank.rank() == 1 && sends)  // a sender in one direction has no receive to count
    killer = std::thread([] { std::this_thread::sleep_for(300ms), ::kill(::getpid(), SIGKILL); });
  const auto started = Clock::now();
  CHECK(rank.transfer(100'000, die, !sends) == remote_error);
  CHECK(Clock::now() - started < 40s);
  CHECK(log_has("WARN NET/holmes : ") && log_has("rank 1 (host ") && log_has(") on NIC lo is lost: ") &&
        log_has("seen by rank 0 (host "));
  if (killer.joinable()) killer.join();
  rank.close();
}

void killed_in_both_directions(Rank& rank) { killed(rank, false); }
void killed_sender(Rank& rank) { killed(rank, true); }

// Each of the others names it.
void killed_of_four(Rank& rank) {
  rank.init();
  CHECK(rank.connect(2, 256 << 10) == success);
  const auto started = Clock::now();
  const auto result = rank.transfer(100'000, [&](int number) {
    if (rank.rank() == 1 && number == 10) ::kill(::getpid(), SIGKILL);
    return true;
  });
  CHECK(result == remote_error && Clock::now() - started < 40s);
  CHECK(log_has("rank 1 (host ") && log_has(") on NIC lo is lost: "));
  rank.barrier(/*dead=*/1);
  rank.close();
}

// NCCL aborts: connections end with messages under way, and their memory is freed at once.
void closed_under_way(Rank& rank) {
  rank.init();
  CHECK(rank.connect(2, 4 << 20) == success);
  const auto result = rank.transfer(100'000, [&](int number) { return rank.rank() == 1 || number < 5; });
  CHECK(result == (rank.rank() == 0 ? success : remote_error));
  rank.close();
  rank.barrier();
  if (rank.rank() == 1) CHECK(log_has("WARN NET/holmes : ") && log_has("rank 0 (host "));
}

void refusals(Rank& rank) {
  rank.init();
  Net& net = rank.net();
  Properties properties;
  std::array<char, handle_bytes> handle;
  void* listener = nullptr;
  CHECK(net.properties(1, &properties) == invalid_usage && net.listen(3, handle.data(), &listener) == invalid_usage);
  CHECK(log_has("there is no device 3"));
  CHECK(rank.connect(1, 1024) == success);
  CHECK(rank.transfer(3) == success);
  void* registration = nullptr;
  CHECK(net.middle.register_memory(nullptr, handle.data(), 10, 2, &registration) == invalid_usage);
  CHECK(log_has("only host memory can be registered"));
  rank.barrier();
  rank.close();
}

// Not a test: how fast messages go from rank 1 to rank 0, by size and number of channels (TEST_CHANNELS, TEST_KIB: only
// these); the best of several goes, as other programs of the machine only make it slower.
void bandwidth(Rank& rank) {
  constexpr std::size_t total_bytes = std::size_t{64} << 20;
  constexpr int goes = 7;
  const auto is_wanted = [](const char* variable, std::size_t value) {
    const char* only = std::getenv(variable);
    return !only || std::to_string(value) == only;
  };
  rank.init();
  rank.measure();
  for (const std::size_t channels : {1, 2, 4, 8}) {
    for (std::size_t bytes = 64 << 10; bytes <= (64 << 20); bytes *= 4) {
      if (!is_wanted("TEST_CHANNELS", channels) || !is_wanted("TEST_KIB", bytes >> 10)) continue;
      const int messages = static_cast<int>(std::max<std::size_t>(total_bytes / bytes / channels, 1));
      CHECK(rank.connect(static_cast<int>(channels), bytes) == success);
      CHECK(rank.transfer(2, nullptr, false) == success);
      double best = 0;
      for (int go = 0; go < goes; ++go) {
        rank.barrier();
        const auto started = Clock::now();
        CHECK(rank.transfer(2 + (go + 1) * messages, nullptr, false) == success);
        rank.barrier();
        const double seconds = std::chrono::duration<double>(Clock::now() - started).count();
        best = std::max(best, static_cast<double>(bytes * channels) * messages / seconds / 1e9);
      }
      if (rank.rank() == 0) std::printf("%zu channels, messages of %zu KiB: %.3f GB/s\n", channels, bytes >> 10, best);
      std::fflush(stdout);
      rank.close();
    }
  }
}

using Life = void (*)(Rank&);
const std::map<std::string, Life> lives = {{"exchange_much", exchange_much},
                                           {"exchange_twice", exchange_twice},
                                           {"rails", rails},
                                           {"lost_nic", lost_nic},
                                           {"encrypted", encrypted},
                                           {"wrong_secret", wrong_secret},
                                           {"nobody_comes", nobody_comes},
                                           {"garbage", garbage},
                                           {"killed_in_both_directions", killed_in_both_directions},
                                           {"killed_sender", killed_sender},
                                           {"killed_of_four", killed_of_four},
                                           {"many_at_once", many_at_once},
                                           {"two_communicators", two_communicators},
                                           {"closed_under_way", closed_under_way},
                                           {"refusals", refusals},
                                           {"bandwidth", bandwidth}};

// --- two processes ---

using Variables = std::map<std::string, std::string>;

struct Place {
  Variables variables{};
  int network = -1;  // a namespace; -1: this one
};

// `bootstrap`: see Rank.
pid_t start(const std::string& life, int version, int rank, const std::vector<int>& bootstrap, const Place& place) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  if (place.network >= 0 && ::setns(place.network, CLONE_NEWNET) != 0) std::_Exit(3);
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("HOLMES_TRANSPORT", "tcp", 1);
  ::setenv("HOLMES_CONNECT_TIMEOUT_S", "40", 1);
  for (const auto& [name, value] : place.variables) ::setenv(name.c_str(), value.c_str(), 1);
  const std::string exe = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::string> words{exe, "rank", life, std::to_string(version), std::to_string(rank)};
  for (const int fd : bootstrap) {
    if (fd >= 0) ::fcntl(fd, F_SETFD, 0);
    words.push_back(std::to_string(fd));
  }
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(exe.c_str(), arguments.data());
  std::_Exit(4);
}

// The wait status; a rank that does not end is killed.
int await(pid_t child, Clock::time_point deadline) {
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) ::kill(child, SIGKILL);
    std::this_thread::sleep_for(5ms);
  }
  return status;
}

// `may_die`: that rank is killed.
void run_ranks(const std::string& life, int version, const std::vector<Place>& places, int may_die = -1) {
  const int size = static_cast<int>(places.size());
  std::vector<std::vector<int>> sockets(places.size(), std::vector<int>(places.size(), -1));
  for (std::size_t one = 0; one < places.size(); ++one)
    for (std::size_t other = 0; other < one; ++other) {
      int pair[2];
      CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      sockets[one][other] = pair[0], sockets[other][one] = pair[1];
    }
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const auto place = static_cast<std::size_t>(rank);
    children.push_back(start(life, version, rank, sockets[place], places[place]));
  }
  for (const auto& row : sockets)
    for (const int fd : row)
      if (fd >= 0) ::close(fd);
  const auto deadline = Clock::now() + (life == "bandwidth" ? 600s : 120s);
  for (int rank = 0; rank < size; ++rank) {
    const int status = await(children[static_cast<std::size_t>(rank)], deadline);
    const bool is_good = rank == may_die ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!is_good) std::fprintf(stderr, "%s, version %d, rank %d: status %x\n", life.c_str(), version, rank, status);
    CHECK(is_good);
  }
}

void run_pair(const std::string& life, int version, Place first = {}, Place second = {}, int may_die = -1) {
  run_ranks(life, version, {std::move(first), std::move(second)}, may_die);
}

Place with(Variables variables, int network = -1) { return {std::move(variables), network}; }

// --- tests ---

void test_versions() {
  for (const int version : {8, 9, 10, 11, 12}) run_pair("exchange_twice", version);
}

void test_exchange() {
  run_pair("exchange_much", 12);
  run_pair("exchange_much", 11, with({{"HOLMES_NICS", "lo,streams:2"}}), with({{"HOLMES_NICS", "lo,streams:3"}}));
  run_pair("exchange_much", 10, with({{"HOLMES_TRANSPORT", "auto"}}), with({{"HOLMES_TRANSPORT", "auto"}}));
  const Variables checked{{"HOLMES_INTEGRITY", "1"}, {"HOLMES_SECRET", "the secret of this job, 0123"}};
  run_pair("exchange_much", 8, with(checked), with(checked));
  run_pair("exchange_much", 12, with({{"HOLMES_IO_THREADS", "2"}}));
  run_pair("many_at_once", 12);
  run_ranks("many_at_once", 12, std::vector<Place>(4));
}

void test_encrypted() {
  if (!::dlopen("libssl.so.3", RTLD_NOW) && !::dlopen("libssl.so.1.1", RTLD_NOW)) {
    std::puts("encrypted: skipped, no OpenSSL");
    return;
  }
  const Variables variables{{"HOLMES_TLS", "all"}};
  run_pair("encrypted", 12, with(variables), with(variables));
  const auto cluster = [](const char* name) { return Variables{{"HOLMES_TLS", "clusters"}, {"HOLMES_CLUSTER", name}}; };
  run_pair("encrypted", 12, with(cluster("a")), with(cluster("b")));
}

void test_strangers() {
  run_pair("wrong_secret", 12,
           with({{"HOLMES_SECRET", "the secret of this job, 0123"}, {"HOLMES_CONNECT_TIMEOUT_S", "8"}}),
           with({{"HOLMES_SECRET", "another secret, not the job's"}, {"HOLMES_CONNECT_TIMEOUT_S", "8"}}));
  run_pair("garbage", 12);
  run_pair("nobody_comes", 11, with({{"HOLMES_CONNECT_TIMEOUT_S", "1"}}));
}

void test_ends() {
  run_pair("killed_in_both_directions", 12, {}, {}, 1);
  run_pair("killed_sender", 10, {}, {}, 1);
  run_ranks("killed_of_four", 12, std::vector<Place>(4), 1);
  run_pair("closed_under_way", 12);
  run_pair("refusals", 9);
}

// In this process: init may fail as often as it likes.
void test_wrong_variables() {
  const auto refuses = [](const char* name, const char* value, const char* part) {
    ::setenv(name, value, 1);
    for (const int version : {8, 10, 12}) CHECK(load(version).init() == invalid_usage);
    ::unsetenv(name);
    CHECK(log_has(part));
  };
  refuses("HOLMES_NICS", "nosuch0", "WARN NET/holmes : no NIC is called 'nosuch0'. This host has: ");
  refuses("HOLMES_NICS", "class:token-ring", "NIC class 'token-ring' does not exist; use one of infiniband, roce");
  refuses("HOLMES_NICS", "rails:many", "rails:many is no number");
  refuses("HOLMES_TLS", "perhaps", "HOLMES_TLS='perhaps'");
  refuses("HOLMES_TRANSPORT", "pigeon", "'pigeon'");
  refuses("HOLMES_IO_THREADS", "0", "HOLMES_IO_THREADS='0'");
  refuses("HOLMES_SECRET", "short", "the job's secret in HOLMES_SECRET");
}

// NCCL closes a plugin when its last communicator ends; the engine's threads go on.
void test_stays_loaded() {
  Net net = load(12);
  CHECK(std::string(net.name) == "holmes" && net.init() == success);
  ::dlclose(plugin_library());
  CHECK(::dlopen(NCCL_NET_PLUGIN_FILE, RTLD_NOW | RTLD_NOLOAD) != nullptr);
  CHECK(net.init() == success);
  CHECK(::dlsym(plugin_library(), "ncclCollNetPlugin_v12") == nullptr);
}

// As a recorded machine: what discovery sees of an emulated host.
std::string sysfs_of(int node, const std::string& folder) {
  namespace fs = std::filesystem;
  const fs::path root = folder + "/" + std::to_string(node);
  const auto write = [&](const fs::path& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << '\n';
  };
  const std::string host = std::to_string(node + 1);
  write("addresses", "r0 10.1.0." + host + "/24\nr1 10.2.0." + host + "/24\nlo 127.0.0.1/8");
  for (const std::string name : {"r0", "r1"}) {
    const std::string device = "class/net/" + name;
    for (const auto& [file, text] :
         {std::pair("type", "1"), {"operstate", "up"}, {"flags", "0x1003"}, {"mtu", "1500"}, {"speed", "1000"}})
      write(device + "/" + file, text);
  }
  return root.string();
}

// Two emulated hosts with two networks between them, r0 and r1. In a user namespace.
class Hosts {
public:
  Hosts() {
    for (const std::string rail : {"0", "1"}) {
      const std::string name = "r" + rail, network = rail == "0" ? "10.1.0." : "10.2.0.";
      on_node(0, "ip link add " + name + " type veth peer name " + name + " netns /proc/self/fd/" +
                     std::to_string(nodes_[1]));
      for (const int node : {0, 1})
        on_node(node, "ip addr add " + network + std::to_string(node + 1) + "/24 dev " + name + " && ip link set " +
                          name + " up");
    }
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
  }
  ~Hosts() { std::filesystem::remove_all(folder_); }

  void on_node(int node, const std::string& command) const {
    std::thread([&] {
      CHECK(::setns(nodes_[node], CLONE_NEWNET) == 0);
      run(command);
    }).join();
  }
  // With both NICs, unless `variables` say otherwise.
  Place place(int node, Variables variables = {}) const {
    variables.insert({{"HOLMES_SYSFS_ROOT", sysfs_of(node, folder_)}, {"HOLMES_NICS", "class:ethernet,rails:2"}});
    return with(std::move(variables), nodes_[node]);
  }

private:
  const int nodes_[2] = {make_namespace(), make_namespace()};
  std::string folder_ = (std::filesystem::temp_directory_path() / "holmes-nccl-net-XXXXXX").string();
};

void test_in_namespace() {
  const Hosts hosts;
  run_pair("rails", 12, hosts.place(0), hosts.place(1));
  run_pair("two_communicators", 12, hosts.place(0), hosts.place(1));
  run_ranks("rails", 11, {hosts.place(0), hosts.place(0), hosts.place(1), hosts.place(1)});
  for (const std::string nic : {"r1", "r0"})
    run_pair("lost_nic", 12, hosts.place(0, {{"TEST_LOST", nic}}), hosts.place(1, {{"TEST_LOST", nic}}));
}

// Not a test: bandwidth over one and over both of two links of 1 Gbit/s.
void links_in_namespace() {
  const Hosts hosts;
  for (const int node : {0, 1})
    for (const std::string nic : {"r0", "r1"})
      hosts.on_node(node, "tc qdisc add dev " + nic + " root tbf rate 1gbit burst 128kb latency 20ms");
  for (const std::string nics : {"r0", "class:ethernet,rails:2"}) {
    std::printf("HOLMES_NICS=%s\n", nics.c_str());
    std::fflush(stdout);
    const Variables variables{{"HOLMES_NICS", nics}, {"NCCL_SOCKET_IFNAME", "r0"}, {"TEST_CHANNELS", "2"}};
    run_pair("bandwidth", 12, hosts.place(0, variables), hosts.place(1, variables));
  }
}

void test_namespaces() { run_in_user_namespace("in_namespace"); }

int run_rank(char** argv) {
  std::vector<int> bootstrap;
  for (char** fd = argv + 5; *fd; ++fd) bootstrap.push_back(std::atoi(*fd));
  Rank rank(load(std::atoi(argv[3])), std::atoi(argv[4]), std::move(bootstrap));
  lives.at(argv[2])(rank);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 5 && std::string(argv[1]) == "rank") return run_rank(argv);
  if (argc > 1 && std::string(argv[1]) == "in_namespace") {
    test_in_namespace();
    return result("test_nccl_net in_namespace");
  }
  if (argc > 1 && std::string(argv[1]) == "links_in_namespace") {
    links_in_namespace();
    return result("test_nccl_net links_in_namespace");
  }
  if (argc > 1 && std::string(argv[1]) == "links") {
    run_in_user_namespace("links_in_namespace");
    return result("test_nccl_net links");
  }
  if (argc > 1 && std::string(argv[1]) == "bandwidth") {
    run_pair("bandwidth", 12);  // HOLMES_NICS and the like come from the environment
    return result("test_nccl_net bandwidth");
  }
  const std::pair<const char*, void (*)()> tests[] = {{"versions", test_versions},
                                                      {"exchange", test_exchange},
                                                      {"encrypted", test_encrypted},
                                                      {"strangers", test_strangers},
                                                      {"ends", test_ends},
                                                      {"namespaces", test_namespaces},
                                                      {"wrong_variables", test_wrong_variables},
                                                      {"stays_loaded", test_stays_loaded}};
  for (const auto& [name, test] : tests) {
    if (argc > 1 && std::string(argv[1]) != name) continue;
    const auto started = Clock::now();
    test();
    std::printf("%s: %.2f s\n", name, std::chrono::duration<double>(Clock::now() - started).count());
  }
  return result("test_nccl_net");
}
