// The network plugin (csrc/nccl_net) under the calls that NCCL makes, in NCCL's order, by two processes.
//
// What NCCL does (2.20 to 2.30, its init, net transport and proxy):
//   once, and with versions 11 and 12 again for each communicator: init, then once devices; getProperties of each
//   device as often as it likes
//   the receiving rank, for each channel: listen; its handle goes to the sending rank by NCCL's own bootstrap
//   the proxy's service thread of each: connect or accept, again and again until there is a connection; a handle that
//   connect gets is one copy in one place until then. Then closeListen, and regMr of the channel's buffers
//   the proxy's progress thread: irecv of up to eight slots ahead, each with the slot's whole size; isend of a slot
//   when the GPU has filled it, with what is in it; test of the oldest message only, sends and receives of all channels
//   in turn. The tag is the sender's rank at the end deregMr, closeSend, closeRecv; finalize (versions 11 and 12) when
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
void bind_with_context(Net& net, const Plugin& plugin) {
  static void* context = nullptr;
  net.init = [&plugin] {
    CommConfig config{no_id};
    return plugin.init(&context, 0x1234, &config, log_of_nccl, nullptr);
  };
  net.listen = [&plugin](int device, void* handle, void** listener) {
    return plugin.listen(context, device, handle, listener);
  };
  net.connect = [&plugin](int device, void* handle, void** connection) {
    return plugin.connect(context, device, handle, connection, nullptr);
  };
  bind_with_sizes(net, plugin);
}

void* plugin_library() {
  static void* const library = ::dlopen(NCCL_NET_PLUGIN_FILE, RTLD_NOW | RTLD_LOCAL);
  if (!library) std::fprintf(stderr, "%s\n", ::dlerror()), std::abort();
  return library;
}

template <typename Plugin>
const Plugin& table(const std::string& version) {
  const auto* found = static_cast<const Plugin*>(::dlsym(plugin_library(), ("ncclNetPlugin_v" + version).c_str()));
  if (!found) std::fprintf(stderr, "%s\n", ::dlerror()), std::abort();
  return *found;
}

Net load(int version) {
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
    bind_with_context(net, table<PluginV11>("11"));
  } else {
    bind_common<PropertiesV12>(net, table<PluginV12>("12"));
    bind_with_context(net, table<PluginV12>("12"));
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

// A message's bytes, different for every one.
void fill(std::vector<unsigned char>& bytes, std::size_t count, int channel, int number) {
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<unsigned char>((i >> 8) * 31 + i * 7 + static_cast<std::size_t>(channel * 59 + number * 13));
}

std::size_t size_of(std::size_t slot_bytes, int channel, int number) {
  const std::size_t sizes[] = {slot_bytes, 0, 1, 4095, slot_bytes / 2 + 1, 64 * 1024, 17, slot_bytes - 1};
  return std::min(sizes[static_cast<std::size_t>(number * 5 + channel) % std::size(sizes)], slot_bytes);
}

// One rank of two. `bootstrap`: a socket to the other one, in place of NCCL's.
class Rank {
public:
  Rank(Net net, int rank, int bootstrap) : net_(std::move(net)), rank_(rank), bootstrap_(bootstrap) {}

  void init() {
    CHECK(net_.init() == success);
    int count = 0;
    CHECK(net_.devices(&count) == success && count == 1);
    Properties properties;
    CHECK(net_.properties(0, &properties) == success);
    CHECK(properties.pointer_support == pointer_to_host && properties.max_receives == 1);
  }

  // `channels` in each direction.
  Result connect(int channels, std::size_t slot_bytes) {
    slot_bytes_ = slot_bytes;
    std::vector<OddHandle> handles(static_cast<std::size_t>(channels));
    std::vector<void*> listeners(handles.size());
    for (std::size_t i = 0; i < handles.size(); ++i)
      if (const Result result = net_.listen(0, handles[i].bytes, &listeners[i]); result != success) return result;
    for (auto& handle : handles) exchange(handle.bytes, handle_bytes);
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
      for (Channel& channel : *side)
        for (auto& slot : channel.slots) {
          slot.resize(slot_bytes);
          void* registration = nullptr;
          CHECK(net_.middle.register_memory(channel.connection, slot.data(), slot_bytes, pointer_to_host,
                                            &registration) == success);
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
      for (std::size_t i = 0; i < sends_.size(); ++i) {
        if (is_duplex || rank_ == 1)
          if (const Result result = push(static_cast<int>(i), messages, all); result != success) return result;
        if (is_duplex || rank_ == 0)
          if (const Result result = pull(static_cast<int>(i), messages, all, goes_on); result != success) return result;
      }
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

  // Gives `bytes` to the other rank and takes its own: a barrier too.
  void exchange(void* bytes, std::size_t count) const {
    CHECK(::send(bootstrap_, bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
    CHECK(::recv(bootstrap_, bytes, count, MSG_WAITALL) == static_cast<ssize_t>(count));
  }
  void barrier() const {
    char byte = 0;
    exchange(&byte, 1);
  }

  Net& net() { return net_; }
  int rank() const { return rank_; }
  std::vector<unsigned char>& received_slot(int channel, int slot) {
    return receives_[static_cast<std::size_t>(channel)].slots[static_cast<std::size_t>(slot)];
  }

private:
  struct Channel {
    void* connection = nullptr;
    std::array<std::vector<unsigned char>, slot_count> slots;
    std::deque<void*> requests;
    int posted = 0, done = 0;
  };

  void close_listeners(std::vector<void*>& listeners) {
    for (void* listener : listeners) CHECK(net_.end.close_listener(listener) == success);
  }

  Result push(int number, int messages, bool& all) {
    Channel& channel = sends_[static_cast<std::size_t>(number)];
    if (channel.posted < messages && channel.posted - channel.done < slot_count) {
      auto& slot = channel.slots[static_cast<std::size_t>(channel.posted % slot_count)];
      const std::size_t bytes = size(number, channel.posted);
      if (checks_) fill(slot, bytes, number + 100 * rank_, channel.posted);
      void* request = nullptr;
      if (const Result result = net_.send(channel.connection, slot.data(), bytes, rank_, &request); result != success)
        return result;
      if (request) channel.requests.push_back(request), ++channel.posted;
    }
    if (!channel.requests.empty()) {
      int done = 0, moved = 0;
      if (const Result result = net_.end.test(channel.requests.front(), &done, &moved); result != success)
        return result;
      if (done) {
        CHECK(static_cast<std::size_t>(moved) == size(number, channel.done));
        channel.requests.pop_front(), ++channel.done;
      }
    }
    all = all && channel.done == messages;
    return success;
  }

  Result pull(int number, int messages, bool& all, const GoesOn& goes_on) {
    Channel& channel = receives_[static_cast<std::size_t>(number)];
    while (channel.posted < messages && channel.posted - channel.done < slot_count) {
      auto& slot = channel.slots[static_cast<std::size_t>(channel.posted % slot_count)];
      void* data = slot.data();
      std::size_t most = slot_bytes_;
      int tag = 1 - rank_;
      void* request = nullptr;
      if (const Result result = net_.receive(channel.connection, 1, &data, &most, &tag, &request); result != success)
        return result;
      if (!request) break;
      channel.requests.push_back(request), ++channel.posted;
    }
    if (!channel.requests.empty()) {
      int done = 0;
      int sizes[8] = {};
      if (const Result result = net_.end.test(channel.requests.front(), &done, sizes); result != success) return result;
      if (done) {
        check_message(channel, number, static_cast<std::size_t>(sizes[0]));
        channel.requests.pop_front(), ++channel.done;
        stopped_ = stopped_ || (goes_on && !goes_on(channel.done));
      }
    }
    all = all && channel.done == messages;
    return success;
  }

  std::size_t size(int channel, int number) const {
    return checks_ ? size_of(slot_bytes_, channel, number) : slot_bytes_;
  }

  void check_message(const Channel& channel, int number, std::size_t bytes) const {
    CHECK(bytes == size(number, channel.done));
    if (!checks_) return;
    std::vector<unsigned char> expected(slot_bytes_);
    fill(expected, bytes, number + 100 * (1 - rank_), channel.done);
    const auto& slot = channel.slots[static_cast<std::size_t>(channel.done % slot_count)];
    CHECK(std::memcmp(slot.data(), expected.data(), bytes) == 0);
  }

  Net net_;
  const int rank_;
  const int bootstrap_;
  std::size_t slot_bytes_ = 0;
  bool stopped_ = false;
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
  CHECK(log_has("NET/holmes : receives from rank " + std::to_string(1 - rank.rank()) + " (host "));
}

// A communicator of NCCL, and another one after its end.
void exchange_twice(Rank& rank) {
  whole_life(rank, 2, 256 << 10, 40);
  whole_life(rank, 1, 64 << 10, 100);
}

void rails(Rank& rank) {
  whole_life(rank, 2, 1 << 20, 60);
  CHECK(log_has("10.1.0.") && log_has("10.2.0."));
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

// One of two NICs goes away while messages are under way.
void lost_nic(Rank& rank) {
  rank.init();
  CHECK(rank.connect(2, 1 << 20) == success);
  const OwnStderr warnings;
  bool is_down = false;
  const auto result = rank.transfer(80, [&](int number) {
    if (number < 20 || rank.rank() != 0 || is_down) return true;
    is_down = true;
    run("ip link set r1 down");
    return true;
  });
  CHECK(result == success);
  rank.barrier();
  rank.close();
  CHECK(contains(warnings.text(), " lost the connection to rank " + std::to_string(1 - rank.rank()) + " (host "));
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
  raw.fill('\x5a');
  void* connection = nullptr;
  CHECK(rank.net().connect(0, raw.data(), &connection) == invalid_usage);
  raw.fill(0);
  Result result = success;
  while (result == success) result = rank.net().connect(0, raw.data(), &connection);
  CHECK(result == remote_error && log_has("is no handle of this plugin"));
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

// Not a test: how fast messages go from rank 1 to rank 0, by size and number of channels.
void bandwidth(Rank& rank) {
  constexpr std::size_t total_bytes = std::size_t{1} << 30;
  rank.init();
  rank.measure();
  for (const int channels : {1, 2, 4, 8}) {
    for (std::size_t bytes = 64 << 10; bytes <= (4 << 20); bytes *= 4) {
      CHECK(rank.connect(channels, bytes) == success);
      CHECK(rank.transfer(2 * slot_count, nullptr, false) == success);
      rank.barrier();
      const auto started = Clock::now();
      const int messages = static_cast<int>(total_bytes / bytes) / channels;
      CHECK(rank.transfer(2 * slot_count + messages, nullptr, false) == success);
      rank.barrier();
      const double seconds = std::chrono::duration<double>(Clock::now() - started).count();
      if (rank.rank() == 0)
        std::printf("%d channels, messages of %zu KiB: %.2f GB/s\n", channels, bytes >> 10,
                    static_cast<double>(total_bytes) / seconds / 1e9);
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
                                           {"closed_under_way", closed_under_way},
                                           {"refusals", refusals},
                                           {"bandwidth", bandwidth}};

// --- two processes ---

using Variables = std::map<std::string, std::string>;

struct Place {
  Variables variables{};
  int network = -1;  // a namespace; -1: this one
};

pid_t start(const std::string& life, int version, int rank, int bootstrap, const Place& place) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  if (place.network >= 0 && ::setns(place.network, CLONE_NEWNET) != 0) std::_Exit(3);
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("HOLMES_TRANSPORT", "tcp", 1);
  ::setenv("HOLMES_CONNECT_TIMEOUT_S", "40", 1);
  for (const auto& [name, value] : place.variables) ::setenv(name.c_str(), value.c_str(), 1);
  ::fcntl(bootstrap, F_SETFD, 0);
  const std::string exe = std::filesystem::read_symlink("/proc/self/exe").string();
  ::execl(exe.c_str(), exe.c_str(), "rank", life.c_str(), std::to_string(version).c_str(), std::to_string(rank).c_str(),
          std::to_string(bootstrap).c_str(), static_cast<char*>(nullptr));
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
void run_pair(const std::string& life, int version, Place first = {}, Place second = {}, int may_die = -1) {
  int sockets[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
  const pid_t children[] = {start(life, version, 0, sockets[0], first), start(life, version, 1, sockets[1], second)};
  for (const int fd : sockets) ::close(fd);
  const auto deadline = Clock::now() + 120s;
  for (int rank = 0; rank < 2; ++rank) {
    const int status = await(children[rank], deadline);
    const bool is_good = rank == may_die ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!is_good) std::fprintf(stderr, "%s, version %d, rank %d: status %x\n", life.c_str(), version, rank, status);
    CHECK(is_good);
  }
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

// Two emulated hosts with two networks between them. Runs in a user namespace.
void test_in_namespace() {
  const int nodes[] = {make_namespace(), make_namespace()};
  const auto on_node = [&](int node, const std::string& command) {
    std::thread([&] {
      CHECK(::setns(nodes[node], CLONE_NEWNET) == 0);
      run(command);
    }).join();
  };
  for (const std::string rail : {"0", "1"}) {
    const std::string name = "r" + rail, network = rail == "0" ? "10.1.0." : "10.2.0.";
    on_node(
        0, "ip link add " + name + " type veth peer name " + name + " netns /proc/self/fd/" + std::to_string(nodes[1]));
    for (const int node : {0, 1})
      on_node(node, "ip addr add " + network + std::to_string(node + 1) + "/24 dev " + name + " && ip link set " +
                        name + " up");
  }
  std::string folder = (std::filesystem::temp_directory_path() / "holmes-nccl-net-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) std::abort();
  const auto place = [&](int node) {
    return with({{"HOLMES_SYSFS_ROOT", sysfs_of(node, folder)}, {"HOLMES_NICS", "class:ethernet,rails:2"}},
                nodes[node]);
  };
  run_pair("rails", 12, place(0), place(1));
  run_pair("lost_nic", 12, place(0), place(1));
  std::filesystem::remove_all(folder);
}

void test_namespaces() { run_in_user_namespace("in_namespace"); }

int run_rank(char** argv) {
  Rank rank(load(std::atoi(argv[3])), std::atoi(argv[4]), std::atoi(argv[5]));
  lives.at(argv[2])(rank);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 6 && std::string(argv[1]) == "rank") return run_rank(argv);
  if (argc > 1 && std::string(argv[1]) == "in_namespace") {
    test_in_namespace();
    return result("test_nccl_net in_namespace");
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
