// How the fake NCCL (2.28 and later) uses a network plugin: found, asked and driven in NCCL's order, by NCCL's own
// binary interface. What goes between ranks of different hosts of a communicator whose netName is the plugin's goes
// over it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fake_nccl {

struct PluginHandle {
  char bytes[128];
};

// A communicator's part of the plugin. One thread at a time.
class PluginNet {
public:
  virtual ~PluginNet() = default;

  // What the peer needs to send to this rank.
  virtual bool listen(int peer, PluginHandle& handle) = 0;
  // Both directions with the peer whose handle this is; true once they stand. Called again until then.
  virtual bool connect(int peer, PluginHandle& of_peer, bool& is_up) = 0;
  virtual bool has(int peer) const = 0;
  // As send and recv of a socket that does not block: bytes that were moved, 0 where the connection has failed, -1
  // where nothing moved: to be called again with the same memory.
  virtual ssize_t move(int peer, bool is_send, char* data, std::size_t bytes) = 0;
  // Ends what a call of `move` has left under way; nothing can be moved afterwards.
  virtual void give_up() = 0;
};

// Finds the plugins of NCCL_NET_PLUGIN, as NCCL does in its first communicator's set-up and never again.
void find_plugins();
// As ncclNetInit with netName `name`: of the plugins that were found. `comm_hash`: of the
// unique id. Null: none of that name can be used, as ncclGetLastError then says.
std::unique_ptr<PluginNet> open_plugin_net(const std::string& name, std::uint64_t comm_hash, int size);
// What NCCL calls a communicator's hash.
std::uint64_t comm_hash_of(const void* unique_id, std::size_t bytes);

}  // namespace fake_nccl
