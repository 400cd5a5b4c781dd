// Library: libibverbs, loaded when RDMA is asked for.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "holmes/transport/rdma/abi.hpp"

namespace holmes::verbs {

// Its functions; those that return an int return 0 or an errno, those that return a pointer null and set errno.
struct Library {
  std::string path;
  Device** (*get_devices)(int* count) = nullptr;
  void (*free_devices)(Device** devices) = nullptr;
  const char* (*device_name)(Device* device) = nullptr;
  Context* (*open)(Device* device) = nullptr;
  int (*close)(Context* context) = nullptr;
  int (*query_port)(Context* context, std::uint8_t port, PortAttributes* attributes) = nullptr;
  int (*query_gid)(Context* context, std::uint8_t port, int index, Gid* gid) = nullptr;
  int (*query_pkey)(Context* context, std::uint8_t port, int index, std::uint16_t* pkey) = nullptr;
  ProtectionDomain* (*allocate_domain)(Context* context) = nullptr;
  int (*free_domain)(ProtectionDomain* domain) = nullptr;
  MemoryRegion* (*register_memory)(ProtectionDomain* domain, void* address, std::size_t length, int access) = nullptr;
  // ibv_reg_dmabuf_mr; null where the library is older than that (rdma-core 34).
  MemoryRegion* (*register_dmabuf)(ProtectionDomain* domain, std::uint64_t offset, std::size_t length,
                                   std::uint64_t address, int fd, int access) = nullptr;
  int (*deregister_memory)(MemoryRegion* region) = nullptr;
  CompletionChannel* (*make_channel)(Context* context) = nullptr;
  int (*destroy_channel)(CompletionChannel* channel) = nullptr;
  CompletionQueue* (*make_queue)(Context* context, int capacity, void* owner, CompletionChannel* channel,
                                 int vector) = nullptr;
  int (*destroy_queue)(CompletionQueue* queue) = nullptr;
  int (*get_event)(CompletionChannel* channel, CompletionQueue** queue, void** owner) = nullptr;
  void (*acknowledge_events)(CompletionQueue* queue, unsigned count) = nullptr;
  // Returns 0 or -1; of a context whose async_fd does not block, -1 where there is none.
  int (*get_async_event)(Context* context, AsyncEvent* event) = nullptr;
  void (*acknowledge_async_event)(AsyncEvent* event) = nullptr;
  QueuePair* (*make_pair)(ProtectionDomain* domain, QpSetup* setup) = nullptr;
  int (*modify_pair)(QueuePair* pair, QpAttributes* attributes, int mask) = nullptr;
  int (*destroy_pair)(QueuePair* pair) = nullptr;
  const char* (*status_text)(Status status) = nullptr;
  // Null where the library is older than that.
  int (*fork_state)() = nullptr;
  // Whether memory that is registered stays the process's own when it forks.
  bool survives_fork() const { return fork_state != nullptr && fork_state() == fork_needs_nothing; }
};

// HOLMES_VERBS_LIBRARY, else libibverbs.so.1; never unloaded. Throws NicError where there is none. Thread-safe.
const Library& library();

// What this process may lock, so that an HCA reaches it; nothing: as much as there is.
std::optional<std::size_t> lockable_bytes();

}  // namespace holmes::verbs
