#include "plugin_net.hpp"

#include <dlfcn.h>
#include <strings.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

#include "fake_comm.hpp"
#include "nccl_net/abi.hpp"

namespace fake_nccl {
namespace {

namespace net = holmes::nccl_net;

constexpr std::size_t message_bytes = 16 << 20;  // a block goes in messages of so many at most

// As NCCL_DEBUG=WARN: the last one is what ncclGetLastError says.
void note(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level != net::log_warn) return;
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail(success, text);
}

#if FAKE_NCCL_VERSION >= 23000
using Table = net::PluginV12;
using Properties = net::PropertiesV12;
constexpr const char* symbol = "ncclNetPlugin_v12";
#else
using Table = net::PluginV11;
using Properties = net::PropertiesV11;
constexpr const char* symbol = "ncclNetPlugin_v11";
#endif

// A plugin of NCCL_NET_PLUGIN. One that fails once is off for good, as in NCCL.
struct Loaded {
  const Table* table = nullptr;
  bool is_asked = false;  // for its devices
  bool is_off = false;
};

void* open(const std::string& name) {
  if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  if (name.find('/') != std::string::npos) return nullptr;
  return ::dlopen(("libnccl-net-" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::mutex plugins_mutex;

std::vector<Loaded>& plugins() {
  static auto* const all = [] {
    auto* found = new std::vector<Loaded>();
    const char* list = std::getenv("NCCL_NET_PLUGIN");
    std::istringstream names(list == nullptr ? "libnccl-net.so" : ::strcasecmp(list, "none") == 0 ? "" : list);
    for (std::string name; std::getline(names, name, ',');) {
      void* handle = open(name);
      const auto* table = handle == nullptr ? nullptr : static_cast<const Table*>(::dlsym(handle, symbol));
      if (table != nullptr) found->push_back({table});
    }
    return found;
  }();
  return *all;
}

class OpenNet final : public PluginNet {
public:
  OpenNet(const Table& table, void* context, int size) : net_(table), context_(context) {
    peers_.resize(static_cast<std::size_t>(size));
  }

  ~OpenNet() override {
    give_up();
    for (const Peer& peer : peers_)
      if (peer.listener != nullptr) net_.end.close_listener(peer.listener);
    net_.finalize(context_);
  }

  bool listen(int peer, PluginHandle& handle) override {
    return net_.listen(context_, 0, handle.bytes, &at(peer).listener) == success;
  }

  bool connect(int peer, PluginHandle& of_peer, bool& is_up) override {
    Peer& one = at(peer);
    if (one.out.connection == nullptr &&
        net_.connect(context_, 0, of_peer.bytes, &one.out.connection, nullptr) != success)
      return false;
    if (one.in.connection == nullptr && net_.middle.accept(one.listener, &one.in.connection, nullptr) != success)
      return false;
    is_up = has(peer);
    return true;
  }

  bool has(int peer) const override {
    const Peer& one = peers_[static_cast<std::size_t>(peer)];
    return one.in.connection != nullptr && one.out.connection != nullptr;
  }

  ssize_t move(int peer, bool is_send, char* data, std::size_t bytes) override {
    if (!has(peer)) return 0;
    Direction& way = is_send ? at(peer).out : at(peer).in;
    bytes = std::min(bytes, message_bytes);
    if (way.request == nullptr) {
      // A title is the caller's as long as its call lasts, which may end before the message has left.
      way.is_title = bytes <= sizeof(way.title);
      if (way.is_title && is_send) std::memcpy(way.title, data, bytes);
      void* memory = way.is_title ? way.title : data;
      const int tag = 7;
      const int begun = is_send ? net_.send(way.connection, memory, bytes, tag, nullptr, nullptr, &way.request)
                                : net_.receive(way.connection, 1, &memory, &bytes, const_cast<int*>(&tag), nullptr,
                                               nullptr, &way.request);
      if (begun != success) return 0;
      if (way.request == nullptr) return -1;
    }
    int done = 0, moved = 0;
    const int result = net_.end.test(way.request, &done, &moved);
    if (result != success) way.request = nullptr;
    if (result != success) return 0;
    if (done == 0) return -1;
    way.request = nullptr;
    if (!is_send && way.is_title) std::memcpy(data, way.title, bytes);
    return moved == static_cast<int>(bytes) ? moved : 0;
  }

  void give_up() override {
    for (Peer& peer : peers_) {
      if (peer.out.connection != nullptr) net_.end.close_send(peer.out.connection);
      if (peer.in.connection != nullptr) net_.end.close_receive(peer.in.connection);
      peer.out = peer.in = {};
    }
  }

private:
  struct Direction {
    void* connection = nullptr;
    void* request = nullptr;  // under way
    bool is_title = false;
    char title[8] = {};
  };
  struct Peer {
    void* listener = nullptr;
    Direction out, in;
  };
  Peer& at(int peer) { return peers_[static_cast<std::size_t>(peer)]; }

  const Table& net_;
  void* const context_;
  std::vector<Peer> peers_;
};

}  // namespace

void find_plugins() {
  const std::lock_guard lock(plugins_mutex);
  plugins();
}

std::unique_ptr<PluginNet> open_plugin_net(const std::string& name, std::uint64_t comm_hash, int size) {
  const std::lock_guard lock(plugins_mutex);
  for (Loaded& one : plugins()) {
    if (one.is_off || ::strcasecmp(one.table->name, name.c_str()) != 0) continue;
    void* context = nullptr;
    net::CommConfig config{-1};
    int count = 0;
    Properties properties{};
    bool works = one.table->init(&context, comm_hash, &config, note, nullptr) == success;
    if (works && !one.is_asked)
      works = one.table->devices(&count) == success && count == 1 &&
              one.table->get_properties(0, &properties) == success && properties.base.max_receives >= 1;
    one.is_asked = one.is_asked || works;
    if (works) return std::make_unique<OpenNet>(*one.table, context, size);
    one.is_off = true;
  }
  fail(success, "Failed to initialize any NET plugin");
  return nullptr;
}

std::uint64_t comm_hash_of(const void* unique_id, std::size_t bytes) {
  std::uint64_t acc[2] = {1, 1};
  const auto* ptr = static_cast<const char*>(unique_id);
  std::size_t size = bytes;
  acc[0] ^= size;
  while (size != 0) {
    acc[0] += acc[1];
    acc[1] ^= acc[0];
    acc[0] ^= acc[0] >> 31;
    acc[0] *= 0x9de62bbc8cef3ce3;
    acc[1] ^= acc[1] >> 32;
    acc[1] *= 0x485cd6311b599e79;
    const std::size_t chunk = std::min(size, sizeof(std::uint64_t));
    std::uint64_t word = 0;
    std::memcpy(&word, ptr, chunk);
    ptr += chunk;
    size -= chunk;
    acc[0] += word;
  }
  std::uint64_t hash = acc[0];
  hash ^= hash >> 31;
  hash *= 0xbac3bd562846de6b;
  hash += acc[1];
  hash ^= hash >> 32;
  return hash * 0x995a187a14e7b445;
}

}  // namespace fake_nccl
