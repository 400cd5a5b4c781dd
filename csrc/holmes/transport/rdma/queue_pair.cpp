#include "holmes/transport/rdma/queue_pair.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <random>

#include "holmes/core/error.hpp"
#include "holmes/core/fork.hpp"
#include "holmes/cuda/gpu_direct.hpp"

namespace holmes {
namespace {

// So many go with the request, where the HCA takes that: a small message and its header, else a header, else a credit.
constexpr std::uint32_t inline_choices[] = {128, 64, 16};
constexpr std::uint32_t psn_mask = 0xffffff;
constexpr std::uint8_t most_hops = 64;
constexpr std::uint8_t shortest_rnr_wait = 12;  // 0.64 ms; it never comes to that: credits see to it
constexpr std::uint8_t endless_rnr_retries = 7;

std::string lock_limit_text() {
  const auto most = verbs::lockable_bytes();
  return most ? std::to_string(*most) + " bytes" : "unlimited memory";
}

}  // namespace

std::string RdmaEndpoint::text() const { return text_of(gid) + " qp " + std::to_string(qp_number); }

RdmaQueuePair::RdmaQueuePair(std::shared_ptr<const RdmaDevice> device, std::shared_ptr<RdmaRings> rings)
    : device_(std::move(device)), library_(device_->library()), rings_(std::move(rings)), epoch_(fork_epoch()) {
  verbs::Context* const context = device_->context();
  region_ = {library_.register_memory(device_->domain(), rings_->base(), rings_->registered_bytes(),
                                      verbs::access_local_write | verbs::access_remote_write),
             {library_.deregister_memory}};
  if (!region_) {
    const int error = errno;
    throw SystemError(refused_text(rings_->registered_bytes(), error) + ", or use transport tcp",
                      {.nic = device_->name(), .system_errno = error});
  }
  try {
    channel_ = {library_.make_channel(context), {library_.destroy_channel}};
    if (!channel_) throw_short("completion channel", errno);
    ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
    sends_ = {library_.make_queue(context, send_depth + 1, nullptr, channel_.get(), 0), {library_.destroy_queue}};
    if (!sends_) throw_short("completion queue", errno);
    receives_ = {library_.make_queue(context, receive_depth + 1, nullptr, channel_.get(), 0), {library_.destroy_queue}};
    if (!receives_) throw_short("completion queue", errno);
    verbs::QpSetup setup{};
    setup.send_queue = sends_.get();
    setup.receive_queue = receives_.get();
    setup.type = verbs::reliable_connected;
    for (const std::uint32_t bytes : inline_choices) {
      setup.capacity = {send_depth, receive_depth, 1, 1, bytes};
      pair_ = {library_.make_pair(device_->domain(), &setup), {library_.destroy_pair}};
      if (pair_) break;
    }
    if (!pair_) throw_short("queue pair", errno);
    inline_bytes_ = setup.capacity.inline_bytes;
    psn_ = std::random_device{}() & psn_mask;
    verbs::QpAttributes start{};
    start.state = verbs::QpState::init;
    start.port = device_->port();
    start.pkey_index = static_cast<std::uint16_t>(device_->settings().rdma_pkey_index);
    start.access = verbs::access_local_write | verbs::access_remote_write | verbs::access_remote_read;
    modify(start, verbs::set_state | verbs::set_port | verbs::set_pkey_index | verbs::set_access, "initialised");
    if (const int error = post_receives(receive_depth)) throw_short("receive", error);
  } catch (...) {
    pair_.reset(), receives_.reset(), sends_.reset(), channel_.reset(), region_.reset();
    throw;
  }
}

RdmaQueuePair::~RdmaQueuePair() {
  if (epoch_ != fork_epoch()) {  // all of it is the parent's
    [[maybe_unused]] const void* const parents[] = {pair_.release(), receives_.release(), sends_.release(),
                                                    channel_.release(), region_.release()};
    return;
  }
  const verbs::QueuePair* const ended = pair_.get();
  pair_.reset(), receives_.reset(), sends_.reset(), channel_.reset(), region_.reset();
  device_->events().forget(ended);
}

std::string RdmaQueuePair::refused_text(std::size_t bytes, int error) const {
  return "cannot register " + std::to_string(bytes) + " bytes of memory with HCA " + device_->name() + ": " +
         errno_text(error) + "; this process may lock " + lock_limit_text() +
         " (ulimit -l): raise that limit (LimitMEMLOCK=infinity, or memlock in limits.conf)";
}

void RdmaQueuePair::throw_short(const std::string& what, int error) const {
  throw SystemError("HCA " + device_->name() + " gives no " + what + ": " + errno_text(error) +
                        "; fewer ranks or communicators at a time need fewer, or use transport tcp",
                    {.nic = device_->name(), .system_errno = error});
}

RdmaEndpoint RdmaQueuePair::endpoint() const {
  RdmaEndpoint own;
  own.qp_number = pair_->number;
  own.psn = psn_;
  own.key = region_->remote_key;
  own.address = reinterpret_cast<std::uint64_t>(rings_->base());
  own.ring_bytes = rings_->bytes();
  own.gid = device_->gid();
  own.lid = device_->attributes().lid;
  own.mtu = static_cast<std::uint8_t>(device_->mtu());
  own.link_layer = device_->attributes().link_layer;
  return own;
}

std::string RdmaQueuePair::path_to(const RdmaEndpoint& peer) const {
  return device_->name() + " " + text_of(device_->gid()) + " -> " + text_of(peer.gid);
}

void RdmaQueuePair::modify(verbs::QpAttributes& attributes, int mask, const char* what) {
  const int error = library_.modify_pair(pair_.get(), &attributes, mask);
  if (error == 0) return;
  throw NicError(
      "a queue pair of " + device_->name() + " (GID " + std::to_string(device_->gid_index()) + " " +
          text_of(device_->gid()) + ") cannot be " + what +
          (peer_.qp_number != 0 ? " to " + peer_.text() : std::string()) + ": " + errno_text(error) +
          "; check that both ports are of one fabric and their GIDs reach each other (HOLMES_RDMA_GID_INDEX)",
      {.nic = device_->name(), .system_errno = error});
}

void RdmaQueuePair::connect(const RdmaEndpoint& peer) {
  if (peer.magic != RdmaEndpoint::right_magic || peer.ring_bytes != rings_->bytes() || peer.mtu < 1 || peer.mtu > 5)
    throw ProtocolError("a peer says of its queue pair what makes no sense; all processes must run the same version",
                        {.nic = device_->name()});
  peer_ = peer;
  const Env& settings = device_->settings();
  verbs::QpAttributes receive{};
  receive.state = verbs::QpState::ready_to_receive;
  receive.path_mtu = std::min<int>(device_->mtu(), peer.mtu);
  receive.peer_qp = peer.qp_number;
  receive.receive_psn = peer.psn;
  receive.max_peer_reads = 1;
  receive.min_rnr_timer = shortest_rnr_wait;
  receive.address.lid = peer.lid;
  receive.address.port = device_->port();
  receive.address.service_level = static_cast<std::uint8_t>(settings.rdma_service_level);
  // InfiniBand inside a subnet needs no global route.
  if (peer.link_layer == verbs::link_ethernet || settings.rdma_gid_index) {
    receive.address.has_route = 1;
    receive.address.route.gid = peer.gid;
    receive.address.route.own_gid_index = static_cast<std::uint8_t>(device_->gid_index());
    receive.address.route.hop_limit = most_hops;
    receive.address.route.traffic_class = static_cast<std::uint8_t>(settings.rdma_traffic_class);
  }
  modify(receive,
         verbs::set_state | verbs::set_address | verbs::set_path_mtu | verbs::set_peer_qp | verbs::set_receive_psn |
             verbs::set_max_peer_reads | verbs::set_min_rnr_timer,
         "connected");
  verbs::QpAttributes send{};
  send.state = verbs::QpState::ready_to_send;
  send.send_psn = psn_;
  send.timeout = static_cast<std::uint8_t>(settings.rdma_timeout);
  send.retries = static_cast<std::uint8_t>(settings.rdma_retries);
  send.rnr_retries = endless_rnr_retries;
  send.max_reads = 1;
  modify(send,
         verbs::set_state | verbs::set_send_psn | verbs::set_timeout | verbs::set_retries | verbs::set_rnr_retries |
             verbs::set_max_reads,
         "made ready to send");
}

int RdmaQueuePair::post_all(std::span<const Write> writes) {
  std::array<verbs::ScatterEntry, most_at_once> entries;
  std::array<verbs::SendRequest, most_at_once> requests{};
  for (std::size_t i = 0; i < writes.size(); ++i) {
    fill(requests[i], entries[i], writes[i]);
    if (i + 1 < writes.size()) requests[i].next = &requests[i + 1];
  }
  return post(requests.front());
}

void RdmaQueuePair::fill(verbs::SendRequest& request, verbs::ScatterEntry& entry, const Write& write) const {
  entry = {reinterpret_cast<std::uint64_t>(write.from), static_cast<std::uint32_t>(write.bytes),
           write.region ? write.region->local_key : region_->local_key};
  request.id = write.id;
  request.entries = &entry;
  request.entry_count = write.bytes > 0 ? 1 : 0;
  request.opcode = write.immediate ? verbs::Opcode::rdma_write_with_immediate : verbs::Opcode::rdma_write;
  if (write.immediate) request.immediate = htonl(*write.immediate);
  request.flags = (write.is_signaled ? verbs::send_signaled : 0U) | (write.is_solicited ? verbs::send_solicited : 0U) |
                  (write.is_fenced ? verbs::send_fence : 0U) |
                  (write.bytes > 0 && write.bytes <= inline_bytes_ ? verbs::send_inline : 0U);
  request.remote_address = peer_.address + write.remote_offset;
  request.remote_key = peer_.key;
}

int RdmaQueuePair::post(verbs::SendRequest& request) {
  verbs::SendRequest* failed = nullptr;
  return pair_->context->operations.post_send(pair_.get(), &request, &failed);
}

int RdmaQueuePair::post_read(std::uint64_t address, std::uint32_t key, std::byte* to, std::size_t bytes,
                             const verbs::MemoryRegion& region, std::uint64_t id, const Write* then) {
  std::array<verbs::ScatterEntry, 2> entries;
  std::array<verbs::SendRequest, 2> requests{};
  entries[0] = {reinterpret_cast<std::uint64_t>(to), static_cast<std::uint32_t>(bytes), region.local_key};
  requests[0].id = id;
  requests[0].entries = &entries[0];
  requests[0].entry_count = 1;
  requests[0].opcode = verbs::Opcode::rdma_read;
  requests[0].flags = id != 0 ? verbs::send_signaled : 0U;
  requests[0].remote_address = address;
  requests[0].remote_key = key;
  if (then) {
    fill(requests[1], entries[1], *then);
    requests[0].next = &requests[1];
  }
  return post(requests.front());
}

SharedRegion RdmaQueuePair::region_of_buffer(const iovec& memory) const {
  return device_->buffer_regions().find(memory);
}

SharedRegion RdmaQueuePair::register_memory(const iovec& memory, int access) const {
  if (SharedRegion known = region_of_buffer(memory)) return known;
  if (device_->settings().rdma_keep_registered)
    if (SharedRegion known = device_->user_regions().find(memory)) return known;
  const auto make = [&] {
    return library_.register_memory(device_->domain(), memory.iov_base, memory.iov_len, access);
  };
  verbs::MemoryRegion* made = make();
  if (!made && device_->user_regions().give_back()) made = make();
  return shared(made);
}

SharedRegion RdmaQueuePair::register_device_memory(const iovec& memory, int gpu, int access) const {
  if (device_->settings().rdma_gpudirect == GpuDirect::peermem)  // the module answers for its addresses
    return shared(library_.register_memory(device_->domain(), memory.iov_base, memory.iov_len, access));
  const auto exported = cuda::export_memory(cuda::Device::get(gpu), memory.iov_base, memory.iov_len);
  if (!exported.fd) return nullptr;
  // The region keeps the memory's pages; of the descriptor it needs nothing more.
  return shared(library_.register_dmabuf(device_->domain(), exported.offset, memory.iov_len,
                                         reinterpret_cast<std::uint64_t>(memory.iov_base), exported.fd.get(), access));
}

SharedRegion RdmaQueuePair::shared(verbs::MemoryRegion* region) const {
  if (!region) return nullptr;
  return {region, [this](verbs::MemoryRegion* ended) {
            if (epoch_ == fork_epoch()) library_.deregister_memory(ended);
          }};
}

void RdmaQueuePair::stop() {
  verbs::QpAttributes attributes{};
  attributes.state = verbs::QpState::error;
  library_.modify_pair(pair_.get(), &attributes, verbs::set_state);  // what else is under way has failed already
}

std::optional<RdmaQueuePair::Trouble> RdmaQueuePair::look_for_trouble(Clock::time_point now) const {
  PortEvents& events = device_->events();
  events.look(now);
  if (events.has_hca_failed()) return Trouble{EIO, "the HCA reports that it has failed"};
  if (events.has_failed(pair_.get())) return Trouble{EIO, "the HCA reports that the queue pair has failed"};
  const auto since = events.down_since();
  if (!since || now - *since < PortEvents::longest_flap) return std::nullopt;
  if (!device_->is_active()) return Trouble{ENETDOWN, "the HCA reports that the port is down"};
  events.set_active();
  return std::nullopt;
}

std::optional<Clock::time_point> RdmaQueuePair::next_trouble() const {
  const auto since = device_->events().down_since();
  return since ? std::optional(*since + PortEvents::longest_flap) : std::nullopt;
}

std::size_t RdmaQueuePair::max_read_bytes() const {
  constexpr std::size_t packets = 256;
  return packets * (std::size_t{128} << std::min<int>(device_->mtu(), peer_.mtu));
}

int RdmaQueuePair::post_receives(std::uint32_t count) {
  constexpr std::uint32_t batch = 32;
  std::array<verbs::ReceiveRequest, batch> requests{};
  for (std::uint32_t done = 0; done < count;) {
    const std::uint32_t now = std::min(batch, count - done);
    for (std::uint32_t i = 0; i < now; ++i) requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
    verbs::ReceiveRequest* failed = nullptr;
    if (const int error = pair_->context->operations.post_receive(pair_.get(), requests.data(), &failed)) return error;
    done += now;
  }
  return 0;
}

std::size_t RdmaQueuePair::poll(verbs::CompletionQueue& queue, std::span<verbs::WorkCompletion> completions) {
  const int count = queue.context->operations.poll(&queue, static_cast<int>(completions.size()), completions.data());
  return static_cast<std::size_t>(std::max(count, 0));
}

void RdmaQueuePair::arm(Wake wake) {
  const auto request = [](verbs::CompletionQueue& queue, bool& is_armed, int only_solicited) {
    if (!is_armed) is_armed = queue.context->operations.request_notification(&queue, only_solicited) == 0;
  };
  if (wake == Wake::any)
    request(*receives_, is_armed_for_receives_, 0);
  else if (!is_armed_for_receives_)
    request(*receives_, is_armed_for_solicited_, 1);
  if (wake != Wake::solicited) request(*sends_, is_armed_for_sends_, 0);
}

bool RdmaQueuePair::take_events() {
  bool any = false;
  verbs::CompletionQueue* queue = nullptr;
  void* owner = nullptr;
  while ((is_armed_for_solicited_ || is_armed_for_receives_ || is_armed_for_sends_) &&
         library_.get_event(channel_.get(), &queue, &owner) == 0) {
    library_.acknowledge_events(queue, 1);
    if (queue == sends_.get())
      is_armed_for_sends_ = false;
    else
      is_armed_for_receives_ = is_armed_for_solicited_ = false;
    any = true;
  }
  return any;
}

}  // namespace holmes
