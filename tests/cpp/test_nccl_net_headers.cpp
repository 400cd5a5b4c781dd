// Our declarations of the plugin interface beside NCCL's own, where these are at hand: built with
// -DHOLMES_NCCL_NET_HEADERS=FOLDER, the folder plugins/net/example/nccl of NCCL's sources (2.30 or later).
#include <cstdint>
#include <cstdio>
// NCCL's are written for C.
#include "nccl_net/abi.hpp"
#include "net.h"
#include "same_layout.hpp"

using namespace holmes::nccl_net;

#define SAME_PROPERTIES_OF_ALL(ours, theirs)                      \
  SAME_MEMBER(ours, name, theirs, name);                          \
  SAME_MEMBER(ours, pci_path, theirs, pciPath);                   \
  SAME_MEMBER(ours, guid, theirs, guid);                          \
  SAME_MEMBER(ours, pointer_support, theirs, ptrSupport);         \
  SAME_MEMBER(ours, registration_is_global, theirs, regIsGlobal); \
  SAME_MEMBER(ours, speed_mbps, theirs, speed);                   \
  SAME_MEMBER(ours, port, theirs, port);                          \
  SAME_MEMBER(ours, latency_us, theirs, latency);                 \
  SAME_MEMBER(ours, max_comms, theirs, maxComms);                 \
  SAME_MEMBER(ours, max_receives, theirs, maxRecvs);              \
  SAME_MEMBER(ours, device_type, theirs, netDeviceType);          \
  SAME_MEMBER(ours, device_version, theirs, netDeviceVersion)

#define SAME_LATER_PROPERTIES(ours, theirs)                  \
  SAME_PROPERTIES_OF_ALL(ours, theirs);                      \
  SAME_MEMBER(ours, force_flush, theirs, forceFlush);        \
  SAME_MEMBER(ours, virtual_device, theirs, vProps);         \
  SAME_MEMBER(ours, max_message_bytes, theirs, maxP2pBytes); \
  SAME_MEMBER(ours, max_collective_bytes, theirs, maxCollBytes)

SAME_PROPERTIES_OF_ALL(PropertiesV8, ncclNetProperties_v8_t);
SAME_LATER_PROPERTIES(PropertiesV9, ncclNetProperties_v9_t);
SAME_LATER_PROPERTIES(PropertiesV9, ncclNetProperties_v10_t);
SAME_LATER_PROPERTIES(LaterProperties<8>, ncclNetProperties_v12_t);
static_assert(offsetof(PropertiesV11, base) == 0 && offsetof(PropertiesV12, base) == 0);
SAME_MEMBER(PropertiesV11, max_requests_at_once, ncclNetProperties_v11_t, maxMultiRequestSize);
SAME_MEMBER(PropertiesV11, base.max_collective_bytes, ncclNetProperties_v11_t, maxCollBytes);
SAME_MEMBER(PropertiesV12, max_requests_at_once, ncclNetProperties_v12_t, maxMultiRequestSize);
SAME_MEMBER(PropertiesV12, rail, ncclNetProperties_v12_t, railId);
SAME_MEMBER(PropertiesV12, plane, ncclNetProperties_v12_t, planeId);
static_assert(sizeof(PropertiesV8) == sizeof(ncclNetProperties_v8_t));
static_assert(sizeof(PropertiesV9) == sizeof(ncclNetProperties_v9_t));
static_assert(sizeof(PropertiesV9) == sizeof(ncclNetProperties_v10_t));
static_assert(sizeof(PropertiesV11) == sizeof(ncclNetProperties_v11_t));
static_assert(sizeof(PropertiesV12) == sizeof(ncclNetProperties_v12_t));

#define SAME_TABLE(ours, theirs)                                       \
  static_assert(sizeof(ours) == sizeof(theirs));                       \
  SAME_MEMBER(ours, name, theirs, name);                               \
  SAME_MEMBER(ours, init, theirs, init);                               \
  SAME_MEMBER(ours, devices, theirs, devices);                         \
  SAME_MEMBER(ours, get_properties, theirs, getProperties);            \
  SAME_MEMBER(ours, listen, theirs, listen);                           \
  SAME_MEMBER(ours, connect, theirs, connect);                         \
  SAME_MEMBER(ours, middle.accept, theirs, accept);                    \
  SAME_MEMBER(ours, middle.register_memory, theirs, regMr);            \
  SAME_MEMBER(ours, middle.register_dma_buf, theirs, regMrDmaBuf);     \
  SAME_MEMBER(ours, middle.deregister_memory, theirs, deregMr);        \
  SAME_MEMBER(ours, send, theirs, isend);                              \
  SAME_MEMBER(ours, receive, theirs, irecv);                           \
  SAME_MEMBER(ours, end.flush, theirs, iflush);                        \
  SAME_MEMBER(ours, end.test, theirs, test);                           \
  SAME_MEMBER(ours, end.close_send, theirs, closeSend);                \
  SAME_MEMBER(ours, end.close_receive, theirs, closeRecv);             \
  SAME_MEMBER(ours, end.close_listener, theirs, closeListen);          \
  SAME_MEMBER(ours, end.get_device_registration, theirs, getDeviceMr); \
  SAME_MEMBER(ours, end.received_is_consumed, theirs, irecvConsumed)

SAME_TABLE(PluginV8, ncclNet_v8_t);
SAME_TABLE(PluginV9, ncclNet_v9_t);
SAME_TABLE(PluginV10, ncclNet_v10_t);
SAME_TABLE(PluginV11, ncclNet_v11_t);
SAME_TABLE(PluginV12, ncclNet_v12_t);
SAME_MEMBER(PluginV9, make_virtual_device, ncclNet_v9_t, makeVDevice);
SAME_MEMBER(PluginV10, make_virtual_device, ncclNet_v10_t, makeVDevice);
SAME_MEMBER(PluginV11, finalize, ncclNet_v11_t, finalize);
SAME_MEMBER(PluginV12, finalize, ncclNet_v12_t, finalize);
SAME_MEMBER(PluginV12, set_attributes, ncclNet_v12_t, setNetAttr);

static_assert(handle_bytes == NCCL_NET_HANDLE_MAXSIZE && pointer_to_host == NCCL_PTR_HOST);
static_assert(success == ncclSuccess && system_error == ncclSystemError && internal_error == ncclInternalError);
static_assert(invalid_usage == ncclInvalidUsage && remote_error == ncclRemoteError);
static_assert(log_warn == NCCL_LOG_WARN && log_info == NCCL_LOG_INFO && log_init == NCCL_INIT && log_net == NCCL_NET);

int main() { std::puts("test_nccl_net_headers: all checks passed"); }
