#include "holmes/transport/rdma/device.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <vector>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/core/text.hpp"
#include "holmes/cuda/gpu_direct.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/discover/sysfs.hpp"

namespace holmes {
namespace {

constexpr int mtu_unit_bytes = 128;  // 1: 256 bytes, 2: 512, ...

int mtu_bytes(int mtu) { return mtu_unit_bytes << mtu; }

std::string state_text(int state) {
  const char* const names[] = {"unknown", "down", "init", "armed", "active", "active, deferred"};
  return state >= 0 && state < 6 ? names[state] : std::to_string(state);
}

verbs::Context* open_device(const verbs::Library& library, const std::string& port_name, const std::string& hca) {
  int count = 0;
  verbs::Device** const devices = library.get_devices(&count);
  std::string known;
  verbs::Context* context = nullptr;
  int error = 0;
  bool is_there = false;
  for (int i = 0; devices != nullptr && i < count; ++i) {
    const std::string name = library.device_name(devices[i]);
    add_word(known, name);
    if (name != hca) continue;
    is_there = true;
    context = library.open(devices[i]);
    error = errno;
  }
  if (devices != nullptr) library.free_devices(devices);
  if (!is_there)
    throw NicError("RDMA over " + port_name + " is asked for, but " + library.path + " knows no HCA '" + hca +
                       "' (it knows: " + (known.empty() ? "none" : known) +
                       "); check that the HCA's driver is loaded and its provider installed (ibv_devices lists them), "
                       "or choose another NIC",
                   {.nic = port_name});
  if (context == nullptr)
    throw SystemError("HCA " + hca + " cannot be opened: " + errno_text(error) +
                          "; check who may use /dev/infiniband (a container needs its devices), or use transport tcp",
                      {.nic = port_name, .system_errno = error});
  return context;
}

// The port's number of "mlx5_0:1", and what its HCA says of it.
std::uint8_t ask_port(const verbs::Library& library, verbs::Context* context, const std::string& name,
                      verbs::PortAttributes& attributes) {
  const auto colon = name.find(':');
  const std::string number = name.substr(colon + 1);
  std::uint8_t port = 0;
  const auto [end, failed] = std::from_chars(number.data(), number.data() + number.size(), port);
  const bool is_number = failed == std::errc{} && end == number.data() + number.size() && port > 0;
  if (!is_number || library.query_port(context, port, &attributes) != 0)
    throw NicError("HCA " + name.substr(0, colon) + " has no port '" + number + "'; name one that it has",
                   {.nic = name});
  return port;
}

}  // namespace

std::string text_of(const verbs::Gid& gid) {
  char text[INET6_ADDRSTRLEN] = {};
  return ::inet_ntop(AF_INET6, gid.bytes, text, sizeof text) ? text : "";
}

std::string with_port(const std::string& hca) { return hca.find(':') == std::string::npos ? hca + ":1" : hca; }

RdmaDevice::RdmaDevice(const std::string& port, const Env& env)
    : settings_(env), library_(verbs::library()), name_(with_port(port)), epoch_(fork_epoch()) {
  context_ = {open_device(library_, name_, name_.substr(0, name_.find(':'))), {library_.close}};
  port_ = ask_port(library_, context_.get(), name_, attributes_);
  events_ = std::make_unique<PortEvents>(library_, context_.get(), port_);
  const ErrorContext here{.nic = name_};
  if (attributes_.state != verbs::port_active)
    throw NicError(
        "port " + name_ + " is " + state_text(attributes_.state) +
            ", not active; check its cable, its interface and the subnet manager (ibstat), or choose another",
        here);
  const auto nic = find_nic(name_);
  gid_index_ = env.rdma_gid_index.value_or(nic ? nic->gid_index.value_or(0) : 0);
  const verbs::Gid none{};
  if (library_.query_gid(context_.get(), port_, gid_index_, &gid_) != 0 ||
      std::equal(std::begin(gid_.bytes), std::end(gid_.bytes), none.bytes))
    throw NicError("port " + name_ + " has no GID number " + std::to_string(gid_index_) +
                       "; see the ones it has in /sys/class/infiniband/*/ports/*/gids, set HOLMES_RDMA_GID_INDEX or "
                       "unset it, and check that its interface is up",
                   here);
  fabric_ = attributes_.link_layer == verbs::link_ethernet ? "RoCE" : "InfiniBand";
  for (const Gid& gid : nic ? nic->gids : std::vector<Gid>{})
    if (gid.index == gid_index_ && attributes_.link_layer == verbs::link_ethernet) fabric_ = gid.type;
  std::uint16_t pkey = 0;
  if (library_.query_pkey(context_.get(), port_, env.rdma_pkey_index, &pkey) != 0 || pkey == 0)
    throw NicError("port " + name_ + " has no P_Key number " + std::to_string(env.rdma_pkey_index) +
                       "; set HOLMES_RDMA_PKEY_INDEX to one of /sys/class/infiniband/*/ports/*/pkeys, or unset it",
                   here);
  mtu_ = attributes_.active_mtu;
  if (env.rdma_mtu) {
    mtu_ = 0;
    while (mtu_bytes(mtu_) < *env.rdma_mtu) ++mtu_;
    if (mtu_ > attributes_.active_mtu)
      throw NicError("HOLMES_RDMA_MTU=" + std::to_string(*env.rdma_mtu) + " is more than port " + name_ +
                         " has (its active MTU is " + std::to_string(mtu_bytes(attributes_.active_mtu)) +
                         "); set at most that, or raise the MTU of its interface",
                     here);
  }
  domain_ = {library_.allocate_domain(context_.get()), {library_.free_domain}};
  if (!domain_)
    throw SystemError("port " + name_ + " gives no protection domain: " + errno_text(errno),
                      {.nic = name_, .system_errno = errno});
  buffer_regions_ = std::make_unique<BufferRegions>(library_, domain_.get());
  user_regions_ = std::make_unique<UserRegions>(library_, domain_.get());
}

RdmaDevice::~RdmaDevice() {
  if (epoch_ == fork_epoch()) return;
  [[maybe_unused]] auto* const domain = domain_.release();
  [[maybe_unused]] auto* const context = context_.release();
}

int rdma_mtu_bytes(const std::string& port) {
  const verbs::Library& library = verbs::library();
  const std::string name = with_port(port);
  const VerbsPointer<verbs::Context> context{open_device(library, name, name.substr(0, name.find(':'))),
                                             {library.close}};
  verbs::PortAttributes attributes{};
  ask_port(library, context.get(), name, attributes);
  return mtu_bytes(attributes.active_mtu);
}

bool RdmaDevice::takes_device_memory(int gpu) const {
  const GpuDirect way = settings_.rdma_gpudirect;
  if (way == GpuDirect::off) return false;
  std::string missing = cuda::missing_for_gpu_direct(cuda::Device::get(gpu), way);
  if (missing.empty() && way == GpuDirect::dmabuf && library_.register_dmabuf == nullptr)
    missing = library_.path + " registers no dma-buf (it has no ibv_reg_dmabuf_mr); install rdma-core 34 or later";
  const Sysfs sysfs(default_sysfs_root());
  if (missing.empty() && way == GpuDirect::peermem && !sysfs.is_folder("module/nvidia_peermem"))
    missing = "the kernel module nvidia_peermem is not loaded (there is no " + sysfs.root().string() +
              "/module/nvidia_peermem); load it (modprobe nvidia_peermem), or say dmabuf";
  if (missing.empty()) return true;
  throw UsageError(std::string("HOLMES_RDMA_GPUDIRECT='") + (way == GpuDirect::dmabuf ? "dmabuf" : "peermem") +
                       "' is not allowed here: HCA " + name_ + " must be able to reach the memory of GPU " +
                       std::to_string(gpu) + ", but " + missing + ", or unset it: messages go through host memory then",
                   {.nic = name_});
}

bool RdmaDevice::is_active() const {
  verbs::PortAttributes now{};
  return library_.query_port(context_.get(), port_, &now) == 0 && now.state == verbs::port_active;
}

}  // namespace holmes
