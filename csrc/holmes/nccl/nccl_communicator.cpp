#include "holmes/nccl/nccl_communicator.hpp"

#include <algorithm>
#include <iterator>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/nccl/agreement.hpp"
#include "holmes/nccl/watchdog.hpp"
#include "holmes/record/registry.hpp"

namespace holmes {
namespace {

// Kernels of several NCCLs know nothing of each other, and each needs all its CTAs on the GPU at once. So many images
// fit beside the stock library, of which each kernel takes up to so many multiprocessors by itself.
constexpr int images_side_by_side = 3, usual_ctas = 32, few_ctas = 4;

// Of each kernel of a communicator; absent: as many as its NCCL wants. Images share what the stock library leaves of
// the device; of a device on which that is too little for them, each library takes an equal part.
std::optional<int> most_ctas(bool is_image, int multiprocessors) {
  const int left = (multiprocessors - usual_ctas) / images_side_by_side;
  const int share = left >= few_ctas ? left : std::max(1, multiprocessors / (images_side_by_side + 1));
  if (share >= usual_ctas || (!is_image && left >= few_ctas)) return std::nullopt;
  return share;
}

std::string link_layer_of(const nccl::Profile& profile, const std::vector<Nic>& nics) {
  if (profile.net != nccl::Net::ib || profile.hcas.empty()) return "";
  const auto found =
      std::ranges::find_if(nics, [&](const Nic& nic) { return nic.port_name() == profile.hcas.front(); });
  return found == nics.end() ? "" : found->link_layer;
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<Store> store, CommunicatorOptions options, NcclOptions nccl_options,
                                   const Heritage& heritage)
    : store_(std::move(store)), options_(std::move(options)), nccl_options_(std::move(nccl_options)) {
  const auto deadline = Clock::now() + Env::read().connect_timeout.value_or(options_.connect_timeout);
  if (options_.tls.value_or(tls_mode_from_name(Env::read().tls)) == TlsMode::all)
    throw UsageError(
        "communicator '" + options_.name +
        "': NCCL's connections cannot be encrypted, and tls is 'all'; use tls='clusters' (HOLMES_TLS) with "
        "NCCL inside a cluster, or backend='host'");
  CommunicatorOptions control = options_;
  control.name = options_.name + "/control";
  control.clusters.clear();
  control.cluster_nics.clear();
  control.local_completion = false;
  control_ = make_whole_part(store_, std::move(control));

  nccl::RankReport report;
  report.host = host_name();
  nccl::Chosen chosen;
  nccl::UniqueId id{};
  cuda::Device* device = nullptr;
  // What goes wrong on one rank is raised on all.
  const auto try_here = [&](const std::function<void()>& body) {
    try {
      if (report.error.empty()) body();
    } catch (const HolmesError& error) {
      report.error = error.what();
      report.error_kind = static_cast<int>(error.kind());
      report.error_nic = error.context().nic;
    }
  };
  const auto open_rendezvous = [&] {
    if (options_.rank != 0) return;
    const nccl::Result result = chosen.api->get_unique_id(&id);
    if (result == nccl::success) return;
    id = {};
    throw CommunicatorError("NCCL cannot open a rendezvous: " + chosen.api->describe(result));
  };
  const auto left = [&] { return std::max<Duration>(deadline - Clock::now(), std::chrono::milliseconds(1)); };
  try_here([&] {
    const std::vector<Nic> nics = discover_nics(nccl_options_.sysfs_root);
    device = &cuda::Device::get(nccl_options_.device);
    chosen = nccl::choose(nccl_options_.profile, nics, nccl_options_.package_paths);
    report.version = chosen.api->version;
    nccl::config_of(nccl_options_.settings, report.version);  // refuses what is not possible
    report.net = nccl::net_name(nccl_options_.profile.net);
    report.link_layer = link_layer_of(nccl_options_.profile, nics);
  });
  const auto make_session = [&] {
    const bool is_sites = nccl_options_.profile.net == nccl::Net::site;
    nccl::SessionOptions session{options_.name,
                                 report.host,
                                 options_.rank,
                                 options_.size,
                                 is_sites ? "" : report.net,
                                 nccl_options_.settings,
                                 chosen.plugin,
                                 nccl_options_.profile.interfaces};
    if (!session.settings.min_ctas && !session.settings.max_ctas)
      session.settings.max_ctas = most_ctas(chosen.image != nullptr, device->multiprocessors());
    session_ = std::make_shared<nccl::Session>(*chosen.api, *device, std::move(session));
    session_->record()->introduce(control_->flight_record().front());
    register_source(session_->record());
  };
  NcclCommunicator* const parent = heritage.parent;
  bool inherits = heritage.is_split() ||
                  (parent != nullptr && all_agree(chosen.api == &parent->session_->api() && chosen.api->comm_shrink &&
                                                      chosen.plugin == nullptr && !parent->session_->has_failed(),
                                                  deadline));
  nccl::check_agreement(nccl::exchange_reports(*control_, report, left()));
  make_session();
  if (inherits && !inherit(heritage, deadline)) {
    inherits = false;
    make_session();
  }
  description_ = "NCCL " + nccl::version_text(report.version) + ", " +
                 (chosen.image ? chosen.image->text() : "stock library " + nccl::stock_library().path) + ", " +
                 nccl_options_.profile.text() + " (" + chosen.reason + ")" +
                 (inherits ? (heritage.is_split() ? ", split from '" : ", shrunk from '") + parent->name() + "'" : "");
  if (!inherits) {
    // Not before: NCCL keeps a rendezvous open until all ranks have come to it.
    try_here(open_rendezvous);
    CallOptions call;
    call.timeout = left();
    control_->broadcast({id.internal, sizeof(id.internal), DType::uint8}, 0, call)->wait();
    const bool is_open = std::ranges::any_of(id.internal, [](char byte) { return byte != 0; });
    if (!is_open) nccl::check_agreement(nccl::exchange_reports(*control_, report, left()));
  }
  watch_peers();  // also while it connects: one that fails ends the others' set-up
  if (!inherits) session_->connect(id, deadline);
  log(LogLevel::info, options_.rank, "communicator '" + options_.name + "': " + description_);
  for (const std::string& note : chosen.notes)
    log(LogLevel::info, options_.rank, "communicator '" + options_.name + "': " + note);

  const cuda::CurrentDevice current(*device);
  const cuda::RelaxedCapture no_part_of_any_capture;
  const cuda::Driver& cuda = cuda::driver();
  cuda::Address token = 0;
  cuda.check(cuda.memory_allocate(&token, 1), "allocate memory on the GPU");
  barrier_token_ = {reinterpret_cast<void*>(token), 1, DType::uint8,
                    std::shared_ptr<void>(reinterpret_cast<void*>(token), [](void* address) {
                      const cuda::RelaxedCapture no_part_of_any_capture;
                      cuda::driver().memory_free(reinterpret_cast<cuda::Address>(address));
                    })};
  barrier_token_.device = nccl_options_.device;
  nccl::watch(session_);
}

// The host-memory communicator tells at once of a peer that aborts, leaves or is lost, as long as something is pending.
void NcclCommunicator::watch_peers() {
  control_->watch_peers([known = std::weak_ptr(session_)](const Failure& failure) {
    const auto session = known.lock();
    if (!session) return;
    if (is_farewell(failure))
      session->expect_end(failure);
    else
      session->fail(failure);
  });
}

NcclCommunicator::~NcclCommunicator() {
  session_.reset();  // ends NCCL's communicator, while the peers are not told yet: they may have to take part
}

WorkPtr NcclCommunicator::run(const char* operation, std::vector<Buffer> buffers, const CallOptions& call,
                              bool is_one_call, Enqueue enqueue) {
  if (call.compression)
    throw UsageError(std::string(operation) + ": compression is for host memory over clusters; leave it out here");
  if (has_open_group()) {
    session_->throw_if_dead();
    std::lock_guard lock(mutex_);
    OpenGroup& group = open_groups_.at(std::this_thread::get_id());
    std::ranges::move(buffers, std::back_inserter(group.buffers));
    group.parts.push_back(std::move(enqueue));
    group.is_one_call = is_one_call && group.parts.size() == 1;
    return group.work;
  }
  return session_->run({.name = operation,
                        .buffers = std::move(buffers),
                        .timeout = call.timeout.value_or(options_.timeout),
                        .enqueue = std::move(enqueue),
                        .on_callers_stream = !call.async,
                        .is_one_call = is_one_call,
                        .holds_buffers = holds_buffers(call),
                        .frees_in_stream_order = nccl_options_.frees_in_stream_order});
}

bool NcclCommunicator::has_open_group() {
  if (open_group_count_ == 0) return false;
  std::lock_guard lock(mutex_);
  return open_groups_.contains(std::this_thread::get_id());
}

void NcclCommunicator::start_group() {
  session_->throw_if_dead();
  OpenGroup group;
  group.work = std::make_shared<nccl::NcclWork>(cuda::Device::get(nccl_options_.device), nullptr);
  std::lock_guard lock(mutex_);
  if (!open_groups_.emplace(std::this_thread::get_id(), std::move(group)).second)
    throw UsageError("communicator '" + options_.name + "' has an open group in this thread; end it first");
  ++open_group_count_;
}

void NcclCommunicator::abandon_group() {
  std::lock_guard lock(mutex_);
  const auto found = open_groups_.find(std::this_thread::get_id());
  if (found == open_groups_.end()) return;
  const UsageError error("this operation's group was not ended because of an error; it did not start");
  found->second.work->fail(std::make_exception_ptr(error));
  open_groups_.erase(found);
  --open_group_count_;
}

WorkPtr NcclCommunicator::end_group(CallOptions call) {
  OpenGroup group;
  {
    std::lock_guard lock(mutex_);
    const auto found = open_groups_.find(std::this_thread::get_id());
    if (found == open_groups_.end())
      throw UsageError("communicator '" + options_.name + "' has no open group in this thread; start one first");
    group = std::move(found->second);
    open_groups_.erase(found);
    --open_group_count_;
  }
  if (group.parts.empty()) {
    group.work->complete();
    return group.work;
  }
  const auto work = group.work;
  try {
    work->set_caller(group.buffers.empty() ? nullptr : group.buffers.front().stream);
    return session_->run({.name = "group",
                          .buffers = std::move(group.buffers),
                          .timeout = call.timeout.value_or(options_.timeout),
                          .enqueue =
                              [parts = std::move(group.parts)](nccl::Comm comm, nccl::Stream stream) {
                                nccl::Result result = nccl::success;
                                for (const Enqueue& part : parts) {
                                  if (result != nccl::success) break;
                                  result = part(comm, stream);
                                }
                                return result;
                              },
                          .on_callers_stream = !call.async,
                          .is_one_call = group.is_one_call,
                          .holds_buffers = holds_buffers(call),
                          .frees_in_stream_order = nccl_options_.frees_in_stream_order,
                          .work = work});
  } catch (...) {
    work->fail(std::current_exception());
    throw;
  }
}

void NcclCommunicator::abort(const std::string& reason) {
  session_->fail(
      {ErrorKind::aborted,
       "communicator '" + options_.name + "' was aborted on rank " + std::to_string(options_.rank) + ": " + reason,
       {.rank = options_.rank}});
  control_->abort(reason);
}

void* NcclCommunicator::register_buffer(const Buffer& buffer) {
  check("register: the buffer", buffer);
  return register_memory(buffer.data, buffer.bytes(), false);
}

void NcclCommunicator::deregister_buffer(void* handle) { deregister_memory(handle, false); }

void* NcclCommunicator::register_memory(void* address, std::size_t bytes, bool is_symmetric) {
  constexpr int collective_symmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
  const nccl::Api& api = session_->api();
  if (is_symmetric ? api.window_register == nullptr : api.comm_register == nullptr)
    throw UsageError("NCCL " + nccl::version_text(api.version) + " cannot register " +
                     (is_symmetric ? "symmetric memory; use 2.27" : "buffers; use 2.19") +
                     " or later, or leave it out: it only saves copies");
  void* handle = nullptr;
  session_->call("registering a buffer", [&](nccl::Comm comm) {
    return is_symmetric ? api.window_register(comm, address, bytes, &handle, collective_symmetric)
                        : api.comm_register(comm, address, bytes, &handle);
  });
  return handle;
}

void NcclCommunicator::deregister_memory(void* handle, bool is_symmetric) {
  const nccl::Api& api = session_->api();
  session_->call("deregistering a buffer", [&](nccl::Comm comm) {
    return is_symmetric ? api.window_deregister(comm, handle) : api.comm_deregister(comm, handle);
  });
}

std::shared_ptr<NcclCommunicator> make_nccl_communicator(std::shared_ptr<Store> store, CommunicatorOptions options,
                                                         NcclOptions nccl_options) {
  return std::make_shared<NcclCommunicator>(std::move(store), std::move(options), std::move(nccl_options));
}

std::shared_ptr<Communicator> NcclCommunicator::split(int color, int key) {
  int number = 0;
  {
    std::lock_guard lock(mutex_);
    number = splits_++;
  }
  auto part = split_options(*control_, options_, number, color, key);
  const auto deadline = Clock::now() + options_.connect_timeout;
  const Heritage heritage{.parent = this, .color = color, .key = key};
  // The id that NCCL gives to the part is not known before, and so not to the plugin.
  const bool is_plugins = nccl_options_.profile.net == nccl::Net::plugin;
  if (!all_agree(session_->api().comm_split != nullptr && !session_->is_dead() && !is_plugins, deadline))
    return part ? make_nccl_communicator(store_, std::move(*part), nccl_options_) : nullptr;
  if (part)
    return std::shared_ptr<NcclCommunicator>(new NcclCommunicator(store_, std::move(*part), nccl_options_, heritage));
  // NCCL wants every rank to call, also those that take no part.
  nccl::Session nowhere(session_->api(), cuda::Device::get(nccl_options_.device),
                        {name(), host_name(), rank(), size(), "", nccl_options_.settings});
  const std::string failure = nowhere.connect_split(*session_, -1, 0, deadline);
  if (!failure.empty()) log(LogLevel::warn, options_.rank, "communicator '" + name() + "': split: " + failure);
  return nullptr;
}

bool NcclCommunicator::all_agree(bool here, Clock::time_point deadline) {
  std::int32_t answer = here ? 1 : 0;
  CallOptions call;
  call.timeout = std::max<Duration>(deadline - Clock::now(), std::chrono::milliseconds(1));
  control_->all_reduce({&answer, 1, DType::int32}, ReduceOp::min, call)->wait();
  return answer == 1;
}

// Whether NCCL made the new communicator on every rank; some may have it where others do not.
bool NcclCommunicator::inherit(const Heritage& heritage, Clock::time_point deadline) {
  std::string failure;
  // Half of the time: the rest is for a new one, where a rank fails and the others wait for it here.
  const auto now = Clock::now();
  try {
    nccl::Session& parent = *heritage.parent->session_;
    const auto half = now + (deadline - now) / 2;
    failure = heritage.is_split() ? session_->connect_split(parent, heritage.color, heritage.key, half)
                                  : session_->connect_shrunk(parent, heritage.excluded, half);
  } catch (const HolmesError& error) {
    failure = error.what();
  }
  if (!failure.empty())
    log(LogLevel::info, options_.rank, "communicator '" + name() + "': made anew, not from another one: " + failure);
  return all_agree(failure.empty(), deadline);
}

std::shared_ptr<NcclCommunicator> NcclCommunicator::shrink(std::vector<int> excluded) {
  std::ranges::sort(excluded);
  const auto refuse = [&](const std::string& reason) {
    throw UsageError("shrink of communicator '" + options_.name + "': " + reason);
  };
  if (excluded.empty()) refuse("no rank is excluded; name those that are lost or leave");
  if (std::ranges::adjacent_find(excluded) != excluded.end()) refuse("a rank is named twice; name each once");
  for (const int rank : excluded) check_rank("shrink: excluded rank", rank);
  if (std::ranges::binary_search(excluded, options_.rank))
    refuse("rank " + std::to_string(options_.rank) + " excludes itself; only the ranks that stay call shrink");
  CommunicatorOptions rest = options_;
  {
    std::lock_guard lock(mutex_);
    rest.name = options_.name + "/shrink" + std::to_string(shrinks_++);
  }
  rest.size = options_.size - static_cast<int>(excluded.size());
  rest.rank = options_.rank - static_cast<int>(std::ranges::lower_bound(excluded, options_.rank) - excluded.begin());
  rest.labels.clear();
  const auto made = std::shared_ptr<NcclCommunicator>(
      new NcclCommunicator(store_, std::move(rest), nccl_options_, {.parent = this, .excluded = std::move(excluded)}));
  abort("it was shrunk; use the communicator that shrink returned");
  return made;
}

}  // namespace holmes
