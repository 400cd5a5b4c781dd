// The binary interface of NCCL's network plugins, versions 8 to 12, as far as Holmes uses it: written down here so that
// no header of NCCL is needed to build and one library serves every NCCL from 2.20 on. Layouts and values are those of
// the public headers of its plugin examples, which NCCL keeps for each version.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holmes::nccl_net {

using Result = int;  // ncclResult_t
inline constexpr Result success = 0;
inline constexpr Result system_error = 2;
inline constexpr Result internal_error = 3;
inline constexpr Result invalid_usage = 5;
inline constexpr Result remote_error = 6;

// ncclDebugLogger_t; it formats as printf.
using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line, const char* format, ...);
inline constexpr int log_warn = 2;
inline constexpr int log_info = 3;
inline constexpr unsigned long log_init = 0x1;
inline constexpr unsigned long log_net = 0x10;

inline constexpr std::size_t handle_bytes = 128;
inline constexpr int pointer_to_host = 1;
inline constexpr int no_id = -1;
// What one message may have at most; NCCL takes sizes of what was moved as int.
inline constexpr std::size_t max_message_bytes = std::size_t{1} << 30;

struct PropertiesV8 {
  const char* name;
  const char* pci_path;
  std::uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
};
static_assert(sizeof(PropertiesV8) == 64 && offsetof(PropertiesV8, device_version) == 56);

template <int devices>
struct VirtualDevice {
  int count;
  int numbers[devices];
};

// From version 9 on; more follows it in later ones.
template <int devices>
struct LaterProperties {
  const char* name;
  const char* pci_path;
  std::uint64_t guid;
  int pointer_support;
  int registration_is_global;
  int force_flush;
  int speed_mbps;
  int port;
  float latency_us;
  int max_comms;
  int max_receives;
  int device_type;
  int device_version;
  VirtualDevice<devices> virtual_device;
  std::size_t max_message_bytes;
  std::size_t max_collective_bytes;
};

using PropertiesV9 = LaterProperties<4>;  // and of 10
static_assert(sizeof(PropertiesV9) == 104 && offsetof(PropertiesV9, virtual_device) == 64 &&
              offsetof(PropertiesV9, max_message_bytes) == 88);

struct PropertiesV11 {
  LaterProperties<4> base;
  int max_requests_at_once;
};
static_assert(sizeof(PropertiesV11) == 112 && offsetof(PropertiesV11, max_requests_at_once) == 104);

struct PropertiesV12 {
  LaterProperties<8> base;
  int max_requests_at_once;
  std::int16_t rail;
  std::int16_t plane;
};
static_assert(sizeof(PropertiesV12) == 128 && offsetof(PropertiesV12, base.max_message_bytes) == 104 &&
              offsetof(PropertiesV12, plane) == 126);

// Of one communicator of NCCL.
struct CommConfig {
  int traffic_class;
};

// The functions of a plugin, in the order of NCCL's structures. What is the same in several versions is written once:
// the first part up to init, the one from `accept` to `deregMr`, and the last.
struct Middle {
  Result (*accept)(void* listener, void** connection, void** device_handle);
  Result (*register_memory)(void* connection, void* data, std::size_t bytes, int type, void** registration);
  Result (*register_dma_buf)(void* connection, void* data, std::size_t bytes, int type, std::uint64_t offset, int fd,
                             void** registration);
  Result (*deregister_memory)(void* connection, void* registration);
};

struct End {
  Result (*flush)(void* connection, int count, void** data, int* sizes, void** registrations, void** request);
  Result (*test)(void* request, int* done, int* sizes);
  Result (*close_send)(void* connection);
  Result (*close_receive)(void* connection);
  Result (*close_listener)(void* listener);
  Result (*get_device_registration)(void* connection, void* registration, void** device_registration);
  Result (*received_is_consumed)(void* connection, int count, void* request);
};

struct PluginV8 {
  const char* name;
  Result (*init)(Logger logger);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV8* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** connection, void** device_handle);
  Middle middle;
  Result (*send)(void* connection, void* data, int bytes, int tag, void* registration, void** request);
  Result (*receive)(void* connection, int count, void** data, int* sizes, int* tags, void** registrations,
                    void** request);
  End end;
};
static_assert(sizeof(PluginV8) == 19 * sizeof(void*));

struct PluginV9 {
  const char* name;
  Result (*init)(Logger logger);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV9* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** connection, void** device_handle);
  Middle middle;
  Result (*send)(void* connection, void* data, std::size_t bytes, int tag, void* registration, void** request);
  Result (*receive)(void* connection, int count, void** data, std::size_t* sizes, int* tags, void** registrations,
                    void** request);
  End end;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>* of);
};
static_assert(sizeof(PluginV9) == 20 * sizeof(void*));

struct PluginV10 {
  const char* name;
  Result (*init)(Logger logger, void* profiler);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, PropertiesV9* properties);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, CommConfig* config, void* handle, void** connection, void** device_handle);
  Middle middle;
  Result (*send)(void* connection, void* data, std::size_t bytes, int tag, void* registration, void* event,
                 void** request);
  Result (*receive)(void* connection, int count, void** data, std::size_t* sizes, int* tags, void** registrations,
                    void** events, void** request);
  End end;
  Result (*make_virtual_device)(int* device, VirtualDevice<4>* of);
};
static_assert(sizeof(PluginV10) == 20 * sizeof(void*));

// Versions 11 and 12 differ in their properties and virtual devices.
template <typename Properties, typename Virtual>
struct PluginWithContext {
  const char* name;
  Result (*init)(void** context, std::uint64_t comm_id, CommConfig* config, Logger logger, void* profiler);
  Result (*devices)(int* count);
  Result (*get_properties)(int device, Properties* properties);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Result (*connect)(void* context, int device, void* handle, void** connection, void** device_handle);
  Middle middle;
  Result (*send)(void* connection, void* data, std::size_t bytes, int tag, void* registration, void* event,
                 void** request);
  Result (*receive)(void* connection, int count, void** data, std::size_t* sizes, int* tags, void** registrations,
                    void** events, void** request);
  End end;
  Result (*make_virtual_device)(int* device, Virtual* of);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};
using PluginV11 = PluginWithContext<PropertiesV11, VirtualDevice<4>>;
using PluginV12 = PluginWithContext<PropertiesV12, VirtualDevice<8>>;
static_assert(sizeof(PluginV11) == 22 * sizeof(void*) && sizeof(PluginV12) == 22 * sizeof(void*));

}  // namespace holmes::nccl_net
