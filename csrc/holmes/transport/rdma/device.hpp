// RdmaDevice: one port of an HCA, open, with what its queue pairs need to know of it.
#pragma once

#include <memory>
#include <string>

#include "holmes/core/env.hpp"
#include "holmes/transport/rdma/buffer_regions.hpp"
#include "holmes/transport/rdma/library.hpp"
#include "holmes/transport/rdma/port_events.hpp"
#include "holmes/transport/rdma/user_regions.hpp"

namespace holmes {

// Of a verbs object: destroyed unless the process is a forked child of the one that made it.
template <class Object>
struct VerbsDeleter {
  int (*destroy)(Object*) = nullptr;
  void operator()(Object* object) const { destroy(object); }
};
template <class Object>
using VerbsPointer = std::unique_ptr<Object, VerbsDeleter<Object>>;

class RdmaDevice {
public:
  // `port`: "mlx5_0:1", or "mlx5_0" for its first port. Throws NicError where there is no library, no such HCA or port,
  // it is not active, or HOLMES_RDMA_GID_INDEX or HOLMES_RDMA_MTU do not fit it; SystemError where it cannot be opened.
  RdmaDevice(const std::string& port, const Env& env);
  RdmaDevice(const RdmaDevice&) = delete;
  RdmaDevice& operator=(const RdmaDevice&) = delete;
  ~RdmaDevice();

  const verbs::Library& library() const { return library_; }
  verbs::Context* context() const { return context_.get(); }
  verbs::ProtectionDomain* domain() const { return domain_.get(); }
  const std::string& name() const { return name_; }  // "mlx5_0:1"
  std::uint8_t port() const { return port_; }
  const verbs::PortAttributes& attributes() const { return attributes_; }
  const verbs::Gid& gid() const { return gid_; }
  int gid_index() const { return gid_index_; }
  // What ports must have in common to talk: "InfiniBand", "RoCE v2", ...
  const std::string& fabric() const { return fabric_; }
  int mtu() const { return mtu_; }  // as verbs count it
  const Env& settings() const { return settings_; }
  BufferRegions& buffer_regions() const { return *buffer_regions_; }
  UserRegions& user_regions() const { return *user_regions_; }
  // Whether this process asks for GPUDirect. Throws UsageError where it is asked for and this GPU or host has it not.
  bool takes_device_memory(int gpu) const;
  PortEvents& events() const { return *events_; }
  // Asks the HCA.
  bool is_active() const;

private:
  const Env settings_;
  const verbs::Library& library_;
  std::string name_;
  std::uint8_t port_ = 1;
  std::uint64_t epoch_;
  VerbsPointer<verbs::Context> context_;
  VerbsPointer<verbs::ProtectionDomain> domain_;
  std::unique_ptr<BufferRegions> buffer_regions_;
  std::unique_ptr<UserRegions> user_regions_;
  std::unique_ptr<PortEvents> events_;
  verbs::PortAttributes attributes_{};
  verbs::Gid gid_{};
  int gid_index_ = 0;
  int mtu_ = 0;
  std::string fabric_;
};

// "::ffff:10.0.0.1", "fe80::ff:fe00:a".
std::string text_of(const verbs::Gid& gid);
// Bytes that the port sends in a packet at most, as the HCA tells. Throws as RdmaDevice, but for a port that is not
// active.
int rdma_mtu_bytes(const std::string& port);
// "mlx5_0:1" of "mlx5_0".
std::string with_port(const std::string& hca);

}  // namespace holmes
