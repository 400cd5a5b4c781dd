// What we use of libibverbs' binary interface, declared here: no header is needed to build. Names are of our own,
// values and layouts those of <infiniband/verbs.h> (the same from rdma-core 1 to 56; tests/cpp/test_verbs_abi.cpp
// compares).
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace holmes::verbs {

enum : int { port_down = 1, port_active = 4 };
enum : std::uint8_t { link_unspecified = 0, link_infiniband = 1, link_ethernet = 2 };
enum class QpState : int { reset, init, ready_to_receive, ready_to_send, draining, send_error, error };
enum : int { reliable_connected = 2 };
enum : int { access_local_write = 1, access_remote_write = 2, access_remote_read = 4 };
enum class Opcode : int { rdma_write = 0, rdma_write_with_immediate = 1, rdma_read = 4 };
enum : int { fork_needs_nothing = 2 };
enum : unsigned { send_fence = 1 << 0, send_signaled = 1 << 1, send_solicited = 1 << 2, send_inline = 1 << 3 };
enum : int {
  set_state = 1 << 0,
  set_access = 1 << 3,
  set_pkey_index = 1 << 4,
  set_port = 1 << 5,
  set_address = 1 << 7,
  set_path_mtu = 1 << 8,
  set_timeout = 1 << 9,
  set_retries = 1 << 10,
  set_rnr_retries = 1 << 11,
  set_receive_psn = 1 << 12,
  set_max_reads = 1 << 13,
  set_min_rnr_timer = 1 << 15,
  set_send_psn = 1 << 16,
  set_max_peer_reads = 1 << 17,
  set_peer_qp = 1 << 20,
};
enum class Status : int {
  success = 0,
  flushed = 5,
  remote_invalid_request = 9,
  remote_access = 10,
  remote_operation = 11,
  retries_exceeded = 12,
  receiver_not_ready = 13,
  response_timeout = 20,
};

enum class EventType : int { qp_fatal = 1, device_fatal = 8, port_active = 9, port_error = 10 };

struct Device;
struct Context;
struct CompletionQueue;
struct QueuePair;
struct SharedReceiveQueue;

struct alignas(8) Gid {
  std::uint8_t bytes[16];
};

struct PortAttributes {
  int state;
  int max_mtu;
  int active_mtu;  // 1: 256 bytes, ..., 5: 4096
  int gid_count;
  std::uint32_t capabilities;
  std::uint32_t max_message_bytes;
  std::uint32_t bad_pkeys;
  std::uint32_t qkey_violations;
  std::uint16_t pkey_count;
  std::uint16_t lid;
  std::uint16_t sm_lid;
  std::uint8_t lmc;
  std::uint8_t max_vl;
  std::uint8_t sm_sl;
  std::uint8_t subnet_timeout;
  std::uint8_t init_type_reply;
  std::uint8_t active_width;
  std::uint8_t active_speed;
  std::uint8_t physical_state;
  std::uint8_t link_layer;
  std::uint8_t flags;
  std::uint16_t capabilities2;
};

struct ProtectionDomain {
  Context* context;
  std::uint32_t handle;
};

struct MemoryRegion {
  Context* context;
  ProtectionDomain* domain;
  void* address;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t local_key;
  std::uint32_t remote_key;
};

struct CompletionChannel {
  Context* context;
  int fd;
  int references;
};

struct WorkCompletion {
  std::uint64_t id;
  Status status;
  int opcode;
  std::uint32_t vendor_error;
  std::uint32_t bytes;
  std::uint32_t immediate;  // big-endian
  std::uint32_t qp_number;
  std::uint32_t source_qp;
  unsigned flags;
  std::uint16_t pkey_index;
  std::uint16_t source_lid;
  std::uint8_t service_level;
  std::uint8_t path_bits;
};

struct AsyncEvent {
  union {
    CompletionQueue* queue;
    QueuePair* pair;
    int port;
  } of;
  EventType type;
};

struct ScatterEntry {
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t local_key;
};

struct SendRequest {
  std::uint64_t id;
  SendRequest* next;
  ScatterEntry* entries;
  int entry_count;
  Opcode opcode;
  unsigned flags;
  std::uint32_t immediate;  // big-endian
  std::uint64_t remote_address;
  std::uint32_t remote_key;
  std::uint64_t of_other_operations[9];
};

struct ReceiveRequest {
  std::uint64_t id;
  ReceiveRequest* next;
  ScatterEntry* entries;
  int entry_count;
};

struct QpCapacity {
  std::uint32_t sends;
  std::uint32_t receives;
  std::uint32_t send_entries;
  std::uint32_t receive_entries;
  std::uint32_t inline_bytes;
};

struct QpSetup {
  void* owner;
  CompletionQueue* send_queue;
  CompletionQueue* receive_queue;
  SharedReceiveQueue* shared_receives;
  QpCapacity capacity;
  int type;
  int signals_all;
};

struct GlobalRoute {
  Gid gid;
  std::uint32_t flow_label;
  std::uint8_t own_gid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct Address {
  GlobalRoute route;
  std::uint16_t lid;
  std::uint8_t service_level;
  std::uint8_t path_bits;
  std::uint8_t static_rate;
  std::uint8_t has_route;
  std::uint8_t port;
};

struct QpAttributes {
  QpState state;
  QpState current_state;
  int path_mtu;
  int migration_state;
  std::uint32_t qkey;
  std::uint32_t receive_psn;
  std::uint32_t send_psn;
  std::uint32_t peer_qp;
  unsigned access;
  QpCapacity capacity;
  Address address;
  Address other_address;
  std::uint16_t pkey_index;
  std::uint16_t other_pkey_index;
  std::uint8_t notifies_drained;
  std::uint8_t is_draining;
  std::uint8_t max_reads;
  std::uint8_t max_peer_reads;
  std::uint8_t min_rnr_timer;
  std::uint8_t port;
  std::uint8_t timeout;  // 4.096 us times 2 to the power of it
  std::uint8_t retries;
  std::uint8_t rnr_retries;
  std::uint8_t other_port;
  std::uint8_t other_timeout;
  std::uint32_t rate_limit;
};

// The calls that the library has no function for: its header makes them through these.
struct ContextOperations {
  void* unused_first[11];
  int (*poll)(CompletionQueue* queue, int count, WorkCompletion* completions);
  int (*request_notification)(CompletionQueue* queue, int solicited_only);
  void* unused_middle[12];
  int (*post_send)(QueuePair* pair, SendRequest* request, SendRequest** failed);
  int (*post_receive)(QueuePair* pair, ReceiveRequest* request, ReceiveRequest** failed);
  void* unused_last[5];
};

struct Context {
  Device* device;
  ContextOperations operations;
  int command_fd;
  int async_fd;
  int vector_count;
  pthread_mutex_t mutex;
  void* compatibility;
};

struct CompletionQueue {
  Context* context;
  CompletionChannel* channel;
  void* owner;
  std::uint32_t handle;
  int capacity;
  // and what only the library uses
};

struct QueuePair {
  Context* context;
  void* owner;
  ProtectionDomain* domain;
  CompletionQueue* send_queue;
  CompletionQueue* receive_queue;
  SharedReceiveQueue* shared_receives;
  std::uint32_t handle;
  std::uint32_t number;
  QpState state;
  int type;
  // and what only the library uses
};

}  // namespace holmes::verbs
