// Life cycle, coalescing, send and receive, barriers. The collectives are in collectives.cpp.
#include "process_group_holmes.hpp"

#include <Python.h>

#include <algorithm>

#include "bindings/gil.hpp"
#include "bindings/python_values.hpp"
#include "device_stream.hpp"
#include "holmes/core/text.hpp"
#include "holmes/transport/shared_buffer.hpp"
#include "store_adapter.hpp"

namespace holmes::torch_backend {
namespace {

constexpr Duration max_silence_at_shutdown = std::chrono::seconds(10);

// A shared buffer takes a file descriptor, and is of little use for less.
constexpr std::size_t min_shared_bytes = 1024 * 1024;

// Lets go of the GIL where this thread has it: the engine's last callbacks may need it while we wait for its threads.
class ScopedGilRelease {
public:
  ScopedGilRelease() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

private:
  std::optional<GilRelease> released_;
};

at::Tensor& only_tensor(Tensors& tensors, const char* what) {
  if (tensors.size() != 1)
    throw UsageError(std::string(what) + " got " + std::to_string(tensors.size()) + " tensors; it takes exactly one");
  return tensors.front();
}

// Makes the communicator that sparse tensors move over: as the group's own.
SparseReducer::Make sparse_maker(const c10::intrusive_ptr<::c10d::Store>& store, CommunicatorOptions options) {
  options.name += "/sparse";
  options.hierarchical_min_bytes = never_hierarchical;  // its pieces are uneven
  return [store, options = std::move(options)] {
    return make_communicator(std::make_shared<StoreAdapter>(store), options);
  };
}

// Throws UsageError where it is not above 0, or longer than a Duration can be.
std::chrono::milliseconds checked(std::chrono::milliseconds timeout) {
  to_duration("timeout", std::chrono::duration<double>(timeout).count());
  return timeout;
}

std::uint32_t checked_tag(int tag) {
  if (tag < 0) throw UsageError("tag " + std::to_string(tag) + " is negative; use 0 or more");
  return static_cast<std::uint32_t>(tag);
}

}  // namespace

ProcessGroupHolmes::ProcessGroupHolmes(StorePtr store, CommunicatorOptions options,
                                       std::vector<std::uint64_t> global_ranks, std::string nic_reason,
                                       DeviceCommunicators::Make make_device, Split split, Habits habits)
    : ::c10d::Backend(options.rank, options.size),
      store_(std::move(store)),
      name_(options.name),
      nic_reason_(std::move(nic_reason)),
      habits_(habits),
      timeout_(std::chrono::ceil<std::chrono::milliseconds>(options.timeout)),
      devices_(options.name, options.rank, options.size, std::move(make_device)),
      sparse_(sparse_maker(store_, options)),
      split_(std::move(split)) {
  init();
  const auto cluster_of = [&](int rank) {
    return options.clusters.empty() ? 0 : options.clusters[static_cast<std::size_t>(rank)];
  };
  for (int other = 0; other < size_; ++other)
    if (cluster_of(other) == cluster_of(rank_)) neighbours_.push_back(other);
  options_ = c10::make_intrusive<HolmesOptions>("holmes", timeout_);
  options_->group_name = name_;
  options_->global_ranks_in_group = std::move(global_ranks);
  translated([&] { communicator_ = make_communicator(std::make_shared<StoreAdapter>(store_), std::move(options)); });
  shares_memory_ = std::ranges::any_of(communicator_->connections(),
                                       [](const ConnectionInfo& info) { return info.transport == "shm"; });
}

ProcessGroupHolmes::~ProcessGroupHolmes() {
  const ScopedGilRelease no_gil;
  batches_.clear();
  devices_.clear();
  sparse_.close("process group '" + name_ + "' was destroyed");
  communicator_.reset();
}

ErrorContext ProcessGroupHolmes::here() const {
  ErrorContext context;
  context.rank = rank_;
  return context;
}

std::shared_ptr<Communicator> ProcessGroupHolmes::communicator() const {
  const std::lock_guard lock(mutex_);
  if (!communicator_) throw CommunicatorError("process group '" + name_ + "' is shut down; make a new one", here());
  return communicator_;
}

void ProcessGroupHolmes::setTimeout(std::chrono::milliseconds timeout) {
  translated([&] { options_->timeout = timeout_ = checked(timeout); });
}

ProcessGroupHolmes::BackendPtr ProcessGroupHolmes::split(const StorePtr& store, const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<Options>& options) {
  if (!split_) throw UsageError("process group '" + name_ + "' was made without a way to split it; use new_group");
  if (std::ranges::find(ranks, rank_) == ranks.end()) return nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (store == last_split_store_)
      if (auto made = last_split_.lock()) return made;
  }
  auto made = translated([&] {
    auto [group, inherits] = split_(ranks, options->timeout);
    const ScopedGilRelease no_gil;
    const auto whole = inherits ? devices_.existing_group() : nullptr;
    if (whole) {
      const auto place = std::ranges::find(ranks, rank_) - ranks.begin();
      group->devices_.adopt(
          std::static_pointer_cast<NcclCommunicator>(whole->split(ranks.front(), static_cast<int>(place))));
    }
    return BackendPtr(group);
  });
  const std::lock_guard lock(mutex_);
  last_split_store_ = store;
  last_split_ = c10::weak_intrusive_ptr<::c10d::Backend>(made);
  return made;
}

void ProcessGroupHolmes::stay_out_of_split() {
  translated([&] {
    const ScopedGilRelease no_gil;
    if (const auto whole = devices_.existing_group()) whole->split(-1, 0);
  });
}

void ProcessGroupHolmes::register_memory(void* address, std::size_t bytes, bool is_symmetric) {
  const auto whole = devices_.existing_group();
  if (!whole)
    throw UsageError("process group '" + name_ +
                     "' has no NCCL communicator yet; run an operation on the GPU first, or connect it at once: "
                     "init_process_group(device_id=...)");
  const std::lock_guard lock(mutex_);
  if (!registered_.contains(address))
    registered_[address] = {whole->register_memory(address, bytes, is_symmetric), is_symmetric};
}

void ProcessGroupHolmes::deregister_memory(void* address) {
  const auto whole = devices_.existing_group();
  const std::lock_guard lock(mutex_);
  const auto found = registered_.find(address);
  if (found == registered_.end()) return;
  const Registered registered = found->second;
  registered_.erase(found);
  if (whole && !whole->is_dead()) whole->deregister_memory(registered.handle, registered.is_symmetric);
}

void ProcessGroupHolmes::eagerConnectSingleDevice(at::Device device) {
  const ScopedGilRelease no_gil;
  translated([&] { devices_.group(device); });
}

at::Tensor ProcessGroupHolmes::allocateTensor(long count, at::TensorOptions options) {
  const std::size_t bytes = static_cast<std::size_t>(std::max(count, 0L)) * options.dtype().itemsize();
  if (options.device().is_cpu() && bytes >= min_shared_bytes) {
    try {
      auto buffer = std::make_shared<SharedBuffer>(bytes);
      void* data = buffer->data();
      return at::from_blob(data, {count}, [buffer](void*) mutable { buffer.reset(); }, options);
    } catch (const SystemError&) {  // no descriptor is left, say
    }
  }
  return at::empty({count}, options);
}

::c10d::ErrorType ProcessGroupHolmes::getError() {
  for (const auto& communicator : devices_.made())
    if (communicator->is_dead()) return ::c10d::ErrorType::COMM_ERROR;
  if (const auto sparse = sparse_.communicator(); sparse && sparse->is_dead()) return ::c10d::ErrorType::COMM_ERROR;
  const std::lock_guard lock(mutex_);
  return communicator_ && communicator_->is_dead() ? ::c10d::ErrorType::COMM_ERROR : ::c10d::ErrorType::SUCCESS;
}

void ProcessGroupHolmes::abort() {
  std::shared_ptr<Communicator> communicator;
  {
    const std::lock_guard lock(mutex_);
    communicator = communicator_;
  }
  const std::string reason = "process group '" + name_ + "' was aborted by rank " + std::to_string(rank_);
  for (const auto& on_device : devices_.made()) on_device->abort(reason);
  sparse_.abort(reason);
  if (communicator) communicator->abort(reason);
}

void ProcessGroupHolmes::shutdown() {
  const ScopedGilRelease no_gil;
  std::shared_ptr<Communicator> communicator;  // closed after the lock is released
  {
    const std::lock_guard lock(mutex_);
    communicator = communicator_;
  }
  // As Gloo's and NCCL's do; what has no partner is aborted all the same, after some time without a byte.
  if (communicator) drain(*communicator, max_silence_at_shutdown);
  devices_.clear();
  sparse_.close("process group '" + name_ + "' was shut down");
  const std::lock_guard lock(mutex_);
  batches_.clear();
  communicator_.reset();
}

Duration ProcessGroupHolmes::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == ::c10d::kUnsetTimeout ? timeout_.load() : checked(timeout);
}

ProcessGroupHolmes::Batch* ProcessGroupHolmes::batch_of_this_thread() {
  const std::lock_guard lock(mutex_);
  const auto found = batches_.find(std::this_thread::get_id());
  return found == batches_.end() ? nullptr : &found->second;
}

void ProcessGroupHolmes::startCoalescing() {
  drop_coalescing();  // an exception left it open
  auto work = c10::make_intrusive<WorkHolmes>(rank_, OpType::COALESCED, "holmes:coalesced");
  const std::lock_guard lock(mutex_);
  batches_[std::this_thread::get_id()] = {std::move(work), {}, {}};
}

void ProcessGroupHolmes::drop_coalescing() {
  const auto dropped = [&] {
    const std::lock_guard lock(mutex_);
    return batches_.extract(std::this_thread::get_id());
  }();
  if (dropped.empty()) return;
  for (const auto& on_device : dropped.mapped().device_groups) on_device->abandon_group();
}

TorchWork ProcessGroupHolmes::endCoalescing() {
  return translated([&]() -> TorchWork {
    const auto taken = [&] {
      const std::lock_guard lock(mutex_);
      return batches_.extract(std::this_thread::get_id());
    }();
    if (taken.empty()) throw UsageError("end of a coalescing block that was not started");
    Batch* const batch = &taken.mapped();
    std::vector<WorkPtr> works = std::move(batch->started);
    CallOptions call = message_options();
    call.async = batch->is_async;
    for (const auto& on_device : batch->device_groups) works.push_back(on_device->end_group(call));
    if (!batch->calls.empty()) {
      auto transfers = communicator()->batch(std::move(batch->calls), message_options());
      works.insert(works.end(), transfers.begin(), transfers.end());
    }
    batch->work->start(std::move(works), sequence_);
    return batch->work;
  });
}

TorchWork ProcessGroupHolmes::point_to_point(OpType type, const char* title, at::Tensor& tensor, bool is_send, int peer,
                                             int tag) {
  const std::uint32_t wire_tag = checked_tag(tag);
  const c10::Device device = device_of(tensor);
  Operands operands(device);
  if (habits_.refuses_nan) operands.refuse_nan();
  Buffer buffer = is_send ? operands.input(tensor) : operands.output(tensor);
  if (peer < 0 || peer >= size_)
    throw UsageError("peer rank " + std::to_string(peer) + " is not in 0.." + std::to_string(size_ - 1));
  if (Batch* batch = batch_of_this_thread()) {
    if (device.is_cpu())
      batch->calls.push_back({is_send, std::move(buffer), peer, wire_tag});
    else
      add_device_message(*batch, device, is_send, std::move(buffer), peer, wire_tag);
    batch->work->add(std::move(operands));
    return batch->work;
  }
  auto work = c10::make_intrusive<WorkHolmes>(rank_, type, title);
  work->add(std::move(operands));
  if (!device.is_cpu()) work->set_device(device, habits_.host_waits);
  if (is_host_message(device, peer)) {
    work->start({start_message(*communicator(), is_send, std::move(buffer), peer, wire_tag)}, sequence_);
  } else {
    const auto pair = devices_.pair(device, peer);
    work->start({start_message(*pair, is_send, std::move(buffer), 1 - pair->rank(), wire_tag)}, sequence_);
  }
  return work;
}

c10::Device ProcessGroupHolmes::device_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device() : c10::Device(c10::kCPU);
}

void ProcessGroupHolmes::add_device_message(Batch& batch, c10::Device device, bool is_send, Buffer buffer, int peer,
                                            std::uint32_t tag) {
  batch.work->set_device(device, habits_.host_waits);
  batch.is_async = true;
  const bool is_far = is_host_message(device, peer);
  if (is_far) batch.calls.push_back({is_send, buffer, peer, tag});
  if (neighbours_.size() == 1) return;
  const bool is_used = devices_.existing_group() != nullptr;
  const auto near = is_used ? devices_.group(device) : devices_.of(device, neighbours_);
  if (is_far) return;
  batch.open_group(near);
  const int to = is_used ? peer : static_cast<int>(std::ranges::find(neighbours_, peer) - neighbours_.begin());
  start_message(*near, is_send, std::move(buffer), to, tag);
}

WorkPtr ProcessGroupHolmes::start_message(Communicator& communicator, bool is_send, Buffer buffer, int to,
                                          std::uint32_t tag) const {
  return is_send ? communicator.send(std::move(buffer), to, tag, message_options())
                 : communicator.recv(std::move(buffer), to, tag, message_options());
}

void ProcessGroupHolmes::Batch::open_group(const std::shared_ptr<NcclCommunicator>& communicator) {
  if (std::ranges::find(device_groups, communicator) != device_groups.end()) return;
  communicator->start_group();
  device_groups.push_back(communicator);
}

bool ProcessGroupHolmes::is_host_message(c10::Device device, int peer) const {
  return device.is_cpu() || !std::ranges::binary_search(neighbours_, peer);
}

std::shared_ptr<Communicator> ProcessGroupHolmes::communicator_on(c10::Device device, Batch* batch) {
  if (device.is_cpu()) return communicator();
  communicator();  // throws after shutdown
  auto on_device = devices_.group(device);
  if (batch != nullptr) batch->open_group(on_device);
  return on_device;
}

TorchWork ProcessGroupHolmes::send(Tensors& tensors, int peer, int tag) {
  return translated(
      [&] { return point_to_point(OpType::SEND, "holmes:send", only_tensor(tensors, "send"), true, peer, tag); });
}

TorchWork ProcessGroupHolmes::recv(Tensors& tensors, int peer, int tag) {
  return translated(
      [&] { return point_to_point(OpType::RECV, "holmes:recv", only_tensor(tensors, "recv"), false, peer, tag); });
}

TorchWork ProcessGroupHolmes::recvAnysource(Tensors& tensors, int tag) {
  const struct {
    std::chrono::milliseconds timeout = ::c10d::kUnsetTimeout;
    bool asyncOp = true;
  } opts;
  return run(OpType::RECVANYSOURCE, "holmes:recv_any", opts, only_tensor(tensors, "recv"),
             [&](Operands& operands, Communicator& comm, auto& call) {
               Buffer buffer = operands.output(only_tensor(tensors, "recv"));
               return std::vector{comm.recv_any(std::move(buffer), checked_tag(tag), call)};
             });
}

TorchWork ProcessGroupHolmes::barrier(const ::c10d::BarrierOptions& opts) {
  return run(OpType::BARRIER, "holmes:barrier", opts, {}, [this](Operands&, Communicator& comm, auto& call) {
    const auto on_device = devices_.existing_group();
    if (!on_device) return std::vector{comm.barrier(call)};
    // Behind what the GPU has; the host waits for it, as this is the work of no device.
    const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(*on_device->device()));
    return std::vector{on_device->barrier_on(current_stream(device), call)};
  });
}

std::string ProcessGroupHolmes::arrival_key(std::uint64_t round, int rank) const {
  return "monitored_barrier/" + std::to_string(round) + "/" + std::to_string(rank);
}

void ProcessGroupHolmes::monitoredBarrier(const ::c10d::BarrierOptions& opts, bool /*wait_all_ranks*/) {
  translated([&] {
    const std::uint64_t round = barrier_round_++;
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_or_default(opts.timeout));
    const std::string missing_key = "monitored_barrier/" + std::to_string(round) + "/missing";
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; ++rank) keys.push_back(arrival_key(round, rank));
    store_->set(keys[static_cast<std::size_t>(rank_)], "");
    std::string missing;
    try {
      store_->wait(keys, std::max(timeout, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      for (int rank = 0; rank < size_; ++rank)
        if (!store_->check({keys[static_cast<std::size_t>(rank)]})) add_word(missing, std::to_string(rank));
      // Tells those that arrive after we gave up.
      if (!missing.empty()) store_->set(missing_key, missing);
    }
    if (missing.empty() && store_->check({missing_key})) missing = store_->get_to_str(missing_key);
    if (!missing.empty())  // in the words of ProcessGroupGloo, which people and programs look for
      throw TimeoutError("[Rank " + std::to_string(rank_) + "]: Rank" +
                             (missing.find(',') != std::string::npos ? "s " : " ") + missing +
                             " failed to pass monitoredBarrier in " + std::to_string(timeout.count()) + " ms (number " +
                             std::to_string(round) + " of process group '" + name_ + "')",
                         here());
    // Everybody who is here has left the round before.
    if (round > 0) store_->deleteKey(arrival_key(round - 1, rank_));
  });
}

}  // namespace holmes::torch_backend
