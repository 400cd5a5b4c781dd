// What NCCL looks for in libnccl-net-holmes.so: a table of functions for each version of its interface, all of them
// over the same Network, Listener and Connection.
#include <atomic>
#include <cstring>
#include <new>
#include <string_view>

#include "nccl_net/abi.hpp"
#include "nccl_net/connection.hpp"

namespace holmes::nccl_net {
namespace {

constexpr const char* plugin_name = "holmes";

// --- what NCCL's log is told ---

std::atomic<Logger> nccl_log{nullptr};

void tell(int level, const std::string& text) {
  if (const Logger log = nccl_log.load()) log(level, log_init | log_net, "holmes", 0, "NET/holmes : %s", text.c_str());
}

Result result_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::usage:
    case ErrorKind::nic:
    case ErrorKind::mismatch:
      return invalid_usage;
    case ErrorKind::system:
      return system_error;
    default:
      return remote_error;
  }
}

// Nothing is thrown into NCCL.
template <typename Body>
Result guarded(const Body& body) noexcept {
  try {
    body();
    return success;
  } catch (const HolmesError& error) {
    tell(log_warn, error.what());
    return result_of(error.kind());
  } catch (const std::bad_alloc&) {
    tell(log_warn, "no memory is left");
    return system_error;
  } catch (const std::exception& error) {
    tell(log_warn, error.what());
    return internal_error;
  }
}

void check_device(int device) {
  if (device != 0) throw UsageError("there is no device " + std::to_string(device) + "; this plugin shows one, 0");
}

// --- the calls, as all versions have them ---

Result start(Logger logger) {
  nccl_log = logger;
  return guarded([] { tell(log_info, "using " + Network::get().nics_text()); });
}

// What `init` gave to a communicator; versions up to 10 have none.
Network& network_of(void* context) { return context ? *static_cast<Network*>(context) : Network::first(); }

Result devices(int* count) {
  *count = 1;
  return success;
}

template <typename Properties>
void fill_common(Properties& properties) {
  const Network& network = Network::first();
  properties.name = plugin_name;
  properties.pci_path = network.pci_path();
  properties.guid = std::hash<std::string>()(network.nics_text());
  properties.pointer_support = pointer_to_host;
  properties.registration_is_global = 0;
  properties.speed_mbps = network.speed_mbps();
  properties.port = 0;
  properties.latency_us = 0;  // NCCL's own estimate for its kind of link
  properties.max_comms = 65536;
  properties.max_receives = 1;
  properties.device_type = 0;  // no offload
  properties.device_version = 0;
}

void fill(PropertiesV8& properties) { fill_common(properties); }

template <int devices>
void fill(LaterProperties<devices>& properties) {
  fill_common(properties);
  properties.force_flush = 0;
  properties.virtual_device.count = 1;
  properties.virtual_device.numbers[0] = 0;
  properties.max_message_bytes = max_message_bytes;
  properties.max_collective_bytes = max_message_bytes;
}

void fill(PropertiesV11& properties) {
  fill(properties.base);
  properties.max_requests_at_once = 1;
}

void fill(PropertiesV12& properties) {
  fill(properties.base);
  properties.max_requests_at_once = 1;
  properties.rail = properties.plane = no_id;
}

template <typename Properties>
Result get_properties(int device, Properties* properties) {
  return guarded([&] {
    check_device(device);
    *properties = {};
    fill(*properties);
  });
}

Result listen(void* context, int device, void* handle, void** listener) {
  return guarded([&] {
    check_device(device);
    auto made = std::make_unique<Listener>(network_of(context));
    std::memcpy(handle, &made->handle(), sizeof(Handle));
    *listener = made.release();
  });
}

// A connection that stands, into NCCL's place for it.
void hand_over(std::unique_ptr<Connection> made, void** place) {
  *place = nullptr;
  if (!made) return;
  tell(log_info, made->text());
  *place = made.release();
}

// A copy of NCCL's handle, which may lie at any address; what is noted in it goes back there.
class HandleCopy {
public:
  explicit HandleCopy(void* of_nccl) : of_nccl_(of_nccl) { std::memcpy(&handle, of_nccl, sizeof handle); }
  ~HandleCopy() { std::memcpy(of_nccl_, &handle, sizeof handle); }
  HandleCopy(const HandleCopy&) = delete;
  HandleCopy& operator=(const HandleCopy&) = delete;

  Handle handle;

private:
  void* of_nccl_;
};

Result connect_to(void* context, int device, void* handle, void** connection) {
  return guarded([&] {
    check_device(device);
    HandleCopy copy(handle);
    hand_over(connect(network_of(context), copy.handle), connection);
  });
}

Result accept(void* listener, void** connection, void**) {
  return guarded([&] { hand_over(static_cast<Listener*>(listener)->accept(), connection); });
}

Result register_memory(void*, void*, std::size_t, int type, void** registration) {
  return guarded([&] {
    if (type != pointer_to_host)
      throw UsageError("only host memory can be registered (type 1), not memory of type " + std::to_string(type));
    *registration = nullptr;
  });
}

Result deregister_memory(void*, void*) { return success; }

Result send(void* connection, void* data, std::size_t bytes, int tag, void** request) {
  *request = nullptr;
  return guarded([&] { *request = static_cast<Connection*>(connection)->send(data, bytes, tag); });
}

template <typename Size>
Result receive(void* connection, int count, void** data, const Size* sizes, const int* tags, void** request) {
  *request = nullptr;
  return guarded([&] {
    if (count != 1)
      throw UsageError(std::to_string(count) +
                       " receives at once are more than the one that this plugin says it takes");
    *request = static_cast<Connection*>(connection)->receive(data[0], static_cast<std::size_t>(sizes[0]), tags[0]);
  });
}

// Host memory holds what was received already.
Result flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return success;
}

Result test(void* request, int* done, int* sizes) {
  *done = 0;
  return guarded([&] {
    std::size_t bytes = 0;
    if (!Connection::test(static_cast<Connection::Request*>(request), bytes)) return;
    *done = 1;
    if (sizes) *sizes = static_cast<int>(bytes);
  });
}

Result close_connection(void* connection) {
  return guarded([&] { delete static_cast<Connection*>(connection); });
}

Result close_listener(void* listener) {
  return guarded([&] { delete static_cast<Listener*>(listener); });
}

constexpr Middle middle{accept, register_memory, nullptr, deregister_memory};
constexpr End end{flush, test, close_connection, close_connection, close_listener, nullptr, nullptr};

// --- what differs ---

Result start_v10(Logger logger, void*) { return start(logger); }

Result start_for_comm(void** context, std::uint64_t comm_id, CommConfig*, Logger logger, void*) {
  nccl_log = logger;
  return guarded([&] {
    Network& network = Network::of_comm(comm_id);
    tell(log_info, "using " + network.nics_text());
    *context = &network;
  });
}
Result finalize(void*) { return success; }

Result listen_v8(int device, void* handle, void** listener) { return listen(nullptr, device, handle, listener); }
Result connect_v8(int device, void* handle, void** connection, void**) {
  return connect_to(nullptr, device, handle, connection);
}
Result connect_v10(int device, CommConfig*, void* handle, void** connection, void**) {
  return connect_to(nullptr, device, handle, connection);
}
Result connect_v11(void* context, int device, void* handle, void** connection, void**) {
  return connect_to(context, device, handle, connection);
}

Result send_v8(void* connection, void* data, int bytes, int tag, void*, void** request) {
  return send(connection, data, static_cast<std::size_t>(bytes), tag, request);
}
Result send_v9(void* connection, void* data, std::size_t bytes, int tag, void*, void** request) {
  return send(connection, data, bytes, tag, request);
}
Result send_v10(void* connection, void* data, std::size_t bytes, int tag, void*, void*, void** request) {
  return send(connection, data, bytes, tag, request);
}
Result receive_v8(void* connection, int count, void** data, int* sizes, int* tags, void**, void** request) {
  return receive(connection, count, data, sizes, tags, request);
}
Result receive_v9(void* connection, int count, void** data, std::size_t* sizes, int* tags, void**, void** request) {
  return receive(connection, count, data, sizes, tags, request);
}
Result receive_v10(void* connection, int count, void** data, std::size_t* sizes, int* tags, void**, void**,
                   void** request) {
  return receive(connection, count, data, sizes, tags, request);
}

}  // namespace
}  // namespace holmes::nccl_net

#define HOLMES_EXPORT extern "C" __attribute__((visibility("default"), used))

// For a program that knows Holmes, before NCCL makes the communicator: its NICs, see Network::assign. `comm_id`: the
// hash that NCCL makes of the communicator's unique id. Interfaces 11 and later. Returns a ncclResult_t.
HOLMES_EXPORT holmes::nccl_net::Result holmes_nccl_net_assign(std::uint64_t comm_id, const char* nics) {
  using namespace holmes::nccl_net;
  return guarded([&] { Network::assign(comm_id, nics ? nics : ""); });
}

// How many communicators with this id have come since then and so have those NICs. 0 once NCCL has made it: it brought
// another id, and the communicator is on what HOLMES_NICS says.
HOLMES_EXPORT int holmes_nccl_net_uses(std::uint64_t comm_id) { return holmes::nccl_net::Network::uses(comm_id); }

// Whether a communicator with these NICs would work here, as far as this process can tell. NCCL turns a plugin off for
// good where it fails at that. `problem`: what is wrong, up to so many bytes with the zero.
HOLMES_EXPORT holmes::nccl_net::Result holmes_nccl_net_check(const char* nics, char* problem, std::size_t bytes) {
  using namespace holmes::nccl_net;
  try {
    Network::check(nics ? nics : "");
    return success;
  } catch (const std::exception& error) {
    if (bytes > 0) problem[std::string_view(error.what()).copy(problem, bytes - 1)] = '\0';
    const auto* known = dynamic_cast<const holmes::HolmesError*>(&error);
    return known ? result_of(known->kind()) : internal_error;
  }
}

namespace holmes::nccl_net {

HOLMES_EXPORT const PluginV8 ncclNetPlugin_v8{
    plugin_name, start, devices, get_properties<PropertiesV8>, listen_v8, connect_v8, middle, send_v8, receive_v8, end};
HOLMES_EXPORT const PluginV9 ncclNetPlugin_v9{plugin_name, start,      devices, get_properties<PropertiesV9>,
                                              listen_v8,   connect_v8, middle,  send_v9,
                                              receive_v9,  end,        nullptr};
HOLMES_EXPORT const PluginV10 ncclNetPlugin_v10{plugin_name, start_v10,   devices, get_properties<PropertiesV9>,
                                                listen_v8,   connect_v10, middle,  send_v10,
                                                receive_v10, end,         nullptr};
HOLMES_EXPORT const PluginV11 ncclNetPlugin_v11{plugin_name, start_for_comm,
                                                devices,     get_properties<PropertiesV11>,
                                                listen,      connect_v11,
                                                middle,      send_v10,
                                                receive_v10, end,
                                                nullptr,     finalize,
                                                nullptr};
HOLMES_EXPORT const PluginV12 ncclNetPlugin_v12{plugin_name, start_for_comm,
                                                devices,     get_properties<PropertiesV12>,
                                                listen,      connect_v11,
                                                middle,      send_v10,
                                                receive_v10, end,
                                                nullptr,     finalize,
                                                nullptr};

}  // namespace holmes::nccl_net
