// Our declarations of the plugin interface beside NCCL's own, where these are at hand: built with
// -DHOLMES_NCCL_NET_HEADERS=FOLDER, the folder plugins/net/example/nccl of NCCL's sources (2.30 or later).
#include <cstddef>
#include <cstdint>
#include <cstdio>
// NCCL's are written for C.
#include "nccl_net/abi.hpp"
#include "net.h"

using namespace holmes::nccl_net;

#define SAME(ours, our_member, theirs, their_member)                            \
  static_assert(offsetof(ours, our_member) == offsetof(theirs, their_member) && \
                sizeof(ours::our_member) == sizeof(theirs::their_member))

#define SAME_PROPERTIES_OF_ALL(ours, theirs)               \
  SAME(ours, name, theirs, name);                          \
  SAME(ours, pci_path, theirs, pciPath);                   \
  SAME(ours, guid, theirs, guid);                          \
  SAME(ours, pointer_support, theirs, ptrSupport);         \
  SAME(ours, registration_is_global, theirs, regIsGlobal); \
  SAME(ours, speed_mbps, theirs, speed);                   \
  SAME(ours, port, theirs, port);                          \
  SAME(ours, latency_us, theirs, latency);                 \
  SAME(ours, max_comms, theirs, maxComms);                 \
  SAME(ours, max_receives, theirs, maxRecvs);              \
  SAME(ours, device_type, theirs, netDeviceType);          \
  SAME(ours, device_version, theirs, netDeviceVersion)

#define SAME_LATER_PROPERTIES(ours, theirs)           \
  SAME_PROPERTIES_OF_ALL(ours, theirs);               \
  SAME(ours, force_flush, theirs, forceFlush);        \
  SAME(ours, virtual_device, theirs, vProps);         \
  SAME(ours, max_message_bytes, theirs, maxP2pBytes); \
  SAME(ours, max_collective_bytes, theirs, maxCollBytes)

SAME_PROPERTIES_OF_ALL(PropertiesV8, ncclNetProperties_v8_t);
SAME_LATER_PROPERTIES(PropertiesV9, ncclNetProperties_v9_t);
SAME_LATER_PROPERTIES(PropertiesV9, ncclNetProperties_v10_t);
SAME_LATER_PROPERTIES(LaterProperties<8>, ncclNetProperties_v12_t);
static_assert(offsetof(PropertiesV11, base) == 0 && offsetof(PropertiesV12, base) == 0);
SAME(PropertiesV11, max_requests_at_once, ncclNetProperties_v11_t, maxMultiRequestSize);
SAME(PropertiesV11, base.max_collective_bytes, ncclNetProperties_v11_t, maxCollBytes);
SAME(PropertiesV12, max_requests_at_once, ncclNetProperties_v12_t, maxMultiRequestSize);
SAME(PropertiesV12, rail, ncclNetProperties_v12_t, railId);
SAME(PropertiesV12, plane, ncclNetProperties_v12_t, planeId);
static_assert(sizeof(PropertiesV8) == sizeof(ncclNetProperties_v8_t));
static_assert(sizeof(PropertiesV9) == sizeof(ncclNetProperties_v9_t));
static_assert(sizeof(PropertiesV9) == sizeof(ncclNetProperties_v10_t));
static_assert(sizeof(PropertiesV11) == sizeof(ncclNetProperties_v11_t));
static_assert(sizeof(PropertiesV12) == sizeof(ncclNetProperties_v12_t));

#define SAME_TABLE(ours, theirs)                                \
  static_assert(sizeof(ours) == sizeof(theirs));                \
  SAME(ours, name, theirs, name);                               \
  SAME(ours, init, theirs, init);                               \
  SAME(ours, devices, theirs, devices);                         \
  SAME(ours, get_properties, theirs, getProperties);            \
  SAME(ours, listen, theirs, listen);                           \
  SAME(ours, connect, theirs, connect);                         \
  SAME(ours, middle.accept, theirs, accept);                    \
  SAME(ours, middle.register_memory, theirs, regMr);            \
  SAME(ours, middle.register_dma_buf, theirs, regMrDmaBuf);     \
  SAME(ours, middle.deregister_memory, theirs, deregMr);        \
  SAME(ours, send, theirs, isend);                              \
  SAME(ours, receive, theirs, irecv);                           \
  SAME(ours, end.flush, theirs, iflush);                        \
  SAME(ours, end.test, theirs, test);                           \
  SAME(ours, end.close_send, theirs, closeSend);                \
  SAME(ours, end.close_receive, theirs, closeRecv);             \
  SAME(ours, end.close_listener, theirs, closeListen);          \
  SAME(ours, end.get_device_registration, theirs, getDeviceMr); \
  SAME(ours, end.received_is_consumed, theirs, irecvConsumed)

SAME_TABLE(PluginV8, ncclNet_v8_t);
SAME_TABLE(PluginV9, ncclNet_v9_t);
SAME_TABLE(PluginV10, ncclNet_v10_t);
SAME_TABLE(PluginV11, ncclNet_v11_t);
SAME_TABLE(PluginV12, ncclNet_v12_t);
SAME(PluginV9, make_virtual_device, ncclNet_v9_t, makeVDevice);
SAME(PluginV10, make_virtual_device, ncclNet_v10_t, makeVDevice);
SAME(PluginV11, finalize, ncclNet_v11_t, finalize);
SAME(PluginV12, finalize, ncclNet_v12_t, finalize);
SAME(PluginV12, set_attributes, ncclNet_v12_t, setNetAttr);

static_assert(handle_bytes == NCCL_NET_HANDLE_MAXSIZE && pointer_to_host == NCCL_PTR_HOST);
static_assert(success == ncclSuccess && system_error == ncclSystemError && internal_error == ncclInternalError);
static_assert(invalid_usage == ncclInvalidUsage && remote_error == ncclRemoteError);
static_assert(log_warn == NCCL_LOG_WARN && log_info == NCCL_LOG_INFO && log_init == NCCL_INIT && log_net == NCCL_NET);

int main() { std::puts("test_nccl_net_headers: all checks passed"); }
