#include "holmes/nccl/session.hpp"

#include <algorithm>
#include <thread>

#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"
#include "holmes/nccl/watchdog.hpp"
#include "holmes/record/dump.hpp"

namespace holmes::nccl {
namespace {

// NCCL's errors and operations that are late are noticed so much later.
constexpr auto usual_poll_interval = std::chrono::milliseconds(100);
constexpr auto time_for_a_name = std::chrono::milliseconds(200);
// Where memory is nobody else's until the end is seen.
constexpr auto buffer_poll_interval = std::chrono::milliseconds(5);
constexpr auto patience_with_nccl = std::chrono::seconds(10);  // for a thread inside NCCL
// Before NCCL's communicator is aborted under a thread that is inside: one that peers do not keep there is out by then.
constexpr auto time_to_leave = std::chrono::seconds(1);
constexpr auto peers_check_interval = std::chrono::milliseconds(50);  // in set-up
constexpr auto orderly_end_time = std::chrono::seconds(2);

constexpr int shrink_default = 0, shrink_abort = 1;  // NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT

}  // namespace

Session::Session(const Api& api, cuda::Device& device, SessionOptions options)
    : api_(api), device_(device), options_(std::move(options)) {
  record_ = std::make_shared<SessionRecord>(options_.name, options_.rank, options_.size,
                                            Env::read().flight_recorder_operations);
  const cuda::CurrentDevice current(device_);
  stream_ = device_.make_stream(options_.settings.high_priority);
}

Session::~Session() {
  if (dead_) return;  // the thread that aborts ends everything
  std::deque<Pending> pending;
  {
    std::lock_guard lock(mutex_);
    pending.swap(pending_);
  }
  while (!pending.empty() && pending.front().work->poll()) pending.pop_front();
  if (!pending.empty()) {
    const Failure failure{ErrorKind::aborted, place() + " was destroyed while operations were pending", {}};
    for (auto& one : pending) one.work->fail(error_of(failure));
    dead_ = true;
    abort_in_background(std::move(pending));
    return;
  }
  if (comm_.load() == nullptr) return;
  // In order: finalize tells the peers, destroy is local then. Another thread, as either waits for peers, and for
  // graphs with operations of this communicator to be destroyed.
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto end = std::make_shared<End>();
  std::thread([&api = api_, &device = device_, comm = comm_.load(), stream = stream_, end] {
    try {
      const cuda::CurrentDevice current(device);
      const cuda::RelaxedCapture no_part_of_any_capture;
      if (api.comm_finalize(comm) == success)
        api.comm_destroy(comm);
      else
        api.comm_abort(comm);
      cuda::driver().stream_destroy(stream);
    } catch (const HolmesError& error) {
      log(LogLevel::warn, std::nullopt, std::string("an NCCL communicator did not end in order: ") + error.what());
    }
    std::lock_guard lock(end->mutex);
    end->done = true;
    end->changed.notify_all();
  }).detach();
  std::unique_lock lock(end->mutex);
  end->changed.wait_for(lock, orderly_end_time, [&] { return end->done; });
}

std::string Session::place() const {
  return "communicator '" + options_.name + "', rank " + std::to_string(options_.rank) + " (host " + options_.host +
         ")";
}

void Session::fail_and_throw(ErrorKind kind, const std::string& message) {
  fail({kind, message, {.rank = options_.rank, .host = options_.host}});
  std::lock_guard lock(mutex_);
  throw_error(failure_.kind, failure_.message, failure_.context);
}

bool Session::has_pending() const {
  std::lock_guard lock(mutex_);
  return !pending_.empty();
}

void Session::throw_if_dead() const {
  if (!is_dead()) return;
  std::lock_guard lock(mutex_);
  throw_dead(options_.name, failure_);
}

void Session::fail(const Failure& failure) {
  std::deque<Pending> pending;
  {
    std::lock_guard lock(mutex_);
    if (dead_) return;
    if (!left_) failure_ = failure;
    dead_.store(true, std::memory_order_release);
    pending.swap(pending_);
  }
  record_->fail(failure);
  dump_on_failure(failure.message);
  const auto error = error_of(failure);
  for (auto& one : pending) {
    record_->finish(one.record, false);
    one.work->fail(error);
  }
  abort_in_background(std::move(pending));
}

void Session::expect_end(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    if (is_dead()) return;
    failure_ = failure;
    end_expected_ = Clock::now() + orderly_end_time;
    left_.store(true, std::memory_order_release);
  }
  wake_watchdog();
}

void Session::abort_in_background(std::deque<Pending> pending) {
  // What the thread needs outlives the session.
  std::thread([inside = inside_, &device = device_, &api = api_, comm = comm_.exchange(nullptr), stream = stream_,
               name = place(), pending = std::move(pending)] {
    std::unique_lock alone(*inside, std::defer_lock);
    static_cast<void>(alone.try_lock_for(time_to_leave));
    try {
      const cuda::CurrentDevice current(device);
      const cuda::RelaxedCapture no_part_of_any_capture;
      if (comm != nullptr) api.comm_abort(comm);
      if (alone || alone.try_lock_for(patience_with_nccl))
        cuda::driver().stream_destroy(stream);
      else
        log(LogLevel::error, std::nullopt, name + ": NCCL does not return from a call, also where it is aborted");
    } catch (const HolmesError& error) {
      log(LogLevel::warn, std::nullopt, name + ": " + error.what());
    }
  }).detach();
}

void Session::check_async_error() {
  std::unique_lock alone(*inside_, std::try_to_lock);
  const Comm comm = comm_;
  if (!alone || comm == nullptr) return;
  Result error = success;
  const Result asked = api_.comm_get_async_error(comm, &error);
  alone.unlock();
  if (asked != success) error = asked;
  // Of an argument that was refused its caller has been told.
  if (error == success || error == in_progress || error == invalid_argument) return;
  // NCCL names nobody; the host-memory communicator does, where a peer is lost, as soon as it has seen it.
  const auto now = Clock::now();
  if (!error_seen_) error_seen_ = now;
  if (now < *error_seen_ + time_for_a_name) return;
  fail({ErrorKind::communicator,
        place() + ": NCCL reports an error: " + api_.describe(error),
        {.rank = options_.rank, .host = options_.host}});
}

void Session::finish_ended() {
  std::vector<std::shared_ptr<NcclWork>> works;
  {
    std::lock_guard lock(mutex_);
    for (const Pending& one : pending_) works.push_back(one.work);
  }
  if (works.empty()) return;
  cuda::make_current(device_);
  // NCCL runs a communicator's operations one after the other: of those before one that has ended nothing is asked.
  const auto has_ended = [](const std::shared_ptr<NcclWork>& work) { return work->has_ended(); };
  std::size_t count = 0;
  if (has_ended(works.front())) {
    const bool is_all = works.size() == 1 || has_ended(works.back());
    count = is_all ? works.size()
                   : static_cast<std::size_t>(std::partition_point(works.begin() + 1, works.end() - 1, has_ended) -
                                              works.begin());
  }
  // Without the lock: a work's callbacks may call the session, freeing a buffer may need Python's lock.
  for (std::size_t i = 0; i < count; ++i) {
    works[i]->complete();
    if (const auto finished = take_back(works[i])) record_->finish(finished->record, true);
  }
}

std::optional<Clock::time_point> Session::poll() {
  if (dead_) return std::nullopt;
  try {
    finish_ended();
  } catch (const HolmesError& error) {
    fail({error.kind(), place() + ": " + error.what(), error.context()});
    return std::nullopt;
  }
  const auto now = Clock::now();
  auto next = now + usual_poll_interval;
  std::string late;
  std::optional<Failure> end;
  {
    std::lock_guard lock(mutex_);
    if (pending_.empty()) return std::nullopt;
    if (left_ && now >= end_expected_) end = failure_;
    for (const Pending& one : pending_) {
      if (now >= one.deadline && late.empty())
        late = std::string(one.name) + " (operation " + std::to_string(one.number) + ")";
      next = std::min(next, one.deadline);
      if (!one.buffers.empty() && !one.frees_in_stream_order) next = std::min(next, now + buffer_poll_interval);
    }
  }
  if (end) {
    fail(*end);
    return std::nullopt;
  }
  if (!late.empty()) {
    fail({ErrorKind::timeout,
          place() + ": " + late + " is not finished at its deadline; a peer does not take part, or a link is down",
          {.rank = options_.rank, .host = options_.host}});
    return std::nullopt;
  }
  check_async_error();
  if (error_seen_) next = std::min(next, *error_seen_ + time_for_a_name);
  return dead_ ? std::nullopt : std::optional(next);
}

Result Session::make_comm(const char* what, Make make, Clock::time_point deadline) {
  struct Making {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Result> result;
    Comm comm = nullptr;
    bool is_left = false;
    Settings settings;
    std::string net;
    Config config;
  };
  const auto making = std::make_shared<Making>();
  making->settings = options_.settings;
  making->net = options_.net;
  making->config = config_of(making->settings, api_.version);
  if (!making->net.empty()) making->config.net_name = making->net.c_str();
  std::thread([making, make = std::move(make), &device = device_, &api = api_] {
    Result result = unhandled_cuda_error;
    try {
      const cuda::CurrentDevice current(device);
      const cuda::RelaxedCapture no_part_of_any_capture;
      result = make(&making->comm, &making->config);
    } catch (const HolmesError& error) {
      log(LogLevel::warn, std::nullopt, error.what());
    }
    std::unique_lock lock(making->mutex);
    making->result = result;
    making->changed.notify_all();
    const bool is_left = making->is_left;
    lock.unlock();
    if (is_left && making->comm != nullptr) api.comm_abort(making->comm);
  }).detach();
  std::unique_lock lock(making->mutex);
  const auto is_made = [&] { return making->result.has_value(); };
  while (!making->changed.wait_until(lock, std::min(deadline, Clock::now() + peers_check_interval), is_made)) {
    if (!is_dead() && Clock::now() < deadline) continue;
    making->is_left = true;
    lock.unlock();
    throw_if_dead();  // a peer has failed, and nobody will come to it
    fail_and_throw(ErrorKind::timeout, place() + ": " + what + " is not done at its deadline; a peer does not take " +
                                           "part, or cannot be reached over the chosen NICs");
  }
  comm_ = making->comm;
  return *making->result;
}

void Session::connect(const UniqueId& id, Clock::time_point deadline) {
  // NCCL asks the plugin in this call, once.
  std::shared_ptr<const NetPlugin::Assignment> nics;
  if (options_.plugin != nullptr)
    nics = std::make_shared<NetPlugin::Assignment>(*options_.plugin, id, options_.interfaces);
  const auto make = [&api = api_, id, size = options_.size, rank = options_.rank, nics](Comm* made, Config* config) {
    return api.comm_init_rank_config(made, size, id, rank, config);
  };
  if (const Result result = make_comm("set-up of NCCL", make, deadline); result != success)
    fail_and_throw(ErrorKind::communicator,
                   place() + ": NCCL's set-up failed: " + api_.describe(result) +
                       (nics ? "; NCCL's log has the plugin's reason (NCCL_DEBUG=WARN); where NCCL had made a "
                               "communicator before NCCL_NET_PLUGIN was set, set it before the process starts"
                             : ""));
  if (nics && !nics->was_heeded())
    fail_and_throw(ErrorKind::communicator, place() + ": NCCL " + version_text(api_.version) +
                                                " did not bring its communicator to the network " + "plugin " +
                                                options_.plugin->path() +
                                                ", which so would not use its NICs; use another version " +
                                                "of NCCL, or leave net='holmes' (HOLMES_NCCL_NET) out");
}

std::string Session::connect_shrunk(Session& parent, std::vector<int> excluded, Clock::time_point deadline) {
  const int flags = parent.has_pending() ? shrink_abort : shrink_default;
  const auto make = [&api = api_, inside = parent.inside_, old = parent.comm_.load(), excluded = std::move(excluded),
                     flags](Comm* made, Config* config) mutable {
    const std::lock_guard alone(*inside);
    return api.comm_shrink(old, excluded.data(), static_cast<int>(excluded.size()), made, config, flags);
  };
  if (parent.comm_.load() == nullptr) return "the communicator to shrink has failed";
  const Result result = make_comm("shrinking", make, deadline);
  if (result != success) return api_.describe(result);
  return comm_.load() == nullptr ? "NCCL made no communicator" : "";
}

std::string Session::connect_split(Session& parent, int color, int key, Clock::time_point deadline) {
  const Comm old = parent.comm_.load();
  if (old == nullptr) return "the communicator to split has failed";
  const auto make = [&api = api_, inside = parent.inside_, old, color, key](Comm* made, Config* config) {
    const std::lock_guard alone(*inside);
    return api.comm_split(old, color, key, made, config);
  };
  const Result result = make_comm("splitting", make, deadline);
  if (result != success) return api_.describe(result);
  if (options_.settings.split_share) inside_ = parent.inside_;
  return comm_.load() == nullptr && color >= 0 ? "NCCL made no communicator" : "";
}

std::unique_lock<std::timed_mutex> Session::enter(const char* what, Clock::time_point deadline) {
  std::unique_lock alone(*inside_, std::defer_lock);
  if (!alone.try_lock_until(deadline))
    fail_and_throw(ErrorKind::timeout, place() + ": " + what +
                                           " did not begin before its deadline: another thread is inside NCCL with " +
                                           "this communicator");
  throw_if_dead();
  return alone;
}

// Every stream on which one of the buffers is ready.
void Session::begin_behind(const std::vector<Buffer>& buffers, cuda::Stream stream) const {
  std::vector<cuda::Stream> seen{stream};
  for (const Buffer& buffer : buffers) {
    if (std::ranges::find(seen, buffer.stream) != seen.end()) continue;
    seen.push_back(buffer.stream);
    const cuda::EventPtr ready = device_.take_event();
    const cuda::Driver& cuda = cuda::driver();
    cuda.check(cuda.event_record(ready.get(), buffer.stream), "record a CUDA event");
    cuda.check(cuda.stream_wait_event(stream, ready.get(), 0), "let NCCL's stream wait");
  }
}

std::optional<Session::Pending> Session::take_back(const std::shared_ptr<NcclWork>& work) {
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(pending_, work, &Pending::work);
  if (found == pending_.end()) return std::nullopt;
  std::optional<Pending> taken = std::move(*found);
  pending_.erase(found);
  return taken;
}

void Session::release_buffers(const NcclWork* work) {
  std::vector<Buffer> released;  // end after the lock
  std::lock_guard lock(mutex_);
  // Who waits does so mostly for the last one.
  const auto found =
      std::find_if(pending_.rbegin(), pending_.rend(), [&](const Pending& one) { return one.work.get() == work; });
  if (found != pending_.rend()) released.swap(found->buffers);
}

void Session::release_captured(std::uint64_t number, std::optional<unsigned long long> living_capture) {
  std::vector<Captured> released;  // end after the lock
  std::lock_guard lock(mutex_);
  std::erase_if(captured_, [&](Captured& one) {
    const bool is_done = one.number <= number || one.capture_id != living_capture;
    if (is_done) released.push_back(std::move(one));
    return is_done;
  });
}

Result Session::enqueue_group(const Operation& operation, Comm comm, Stream stream) const {
  Result result = api_.group_start();
  if (result != success) return result;
  result = operation.enqueue(comm, stream);
  const Result ended = api_.group_end();
  return result == success ? ended : result;
}

std::shared_ptr<NcclWork> Session::run(Operation operation) {
  const auto deadline = Clock::now() + operation.timeout;
  throw_if_dead();
  const cuda::Driver& cuda = cuda::driver();
  const cuda::CurrentDevice current(device_);
  const cuda::Stream caller = operation.buffers.empty() ? nullptr : operation.buffers.front().stream;
  auto work = operation.work ? operation.work : std::make_shared<NcclWork>(device_, caller);
  const auto alone = enter(operation.name, deadline);
  const Comm comm = comm_;
  const auto capture = cuda::capture_of(caller);
  const cuda::Stream stream = operation.on_callers_stream ? caller : stream_;
  begin_behind(operation.buffers, stream);

  const bool releases_on_join =
      operation.holds_buffers && operation.frees_in_stream_order &&
      std::ranges::all_of(operation.buffers, [&](const Buffer& buffer) { return buffer.stream == caller; });
  const std::uint64_t number = ++sequence_;
  const std::uint64_t record = capture ? 0 : record_->begin(operation.name, operation.buffers);
  if (!operation.holds_buffers) operation.buffers.clear();
  bool has_captured = false;
  {
    // From here on the watchdog frees this thread at the deadline.
    std::lock_guard lock(mutex_);
    if (!is_dead())
      pending_.push_back({work, std::move(operation.buffers), deadline, operation.name, number, record,
                          operation.frees_in_stream_order});
    has_captured = !captured_.empty();
  }
  if (is_dead()) {
    record_->finish(record, false);
    throw_if_dead();
  }
  if (has_captured) release_captured(0, cuda::capture_of(stream_));
  wake_watchdog();
  const Result result =
      operation.is_one_call ? operation.enqueue(comm, stream) : enqueue_group(operation, comm, stream);
  if (result != success) {
    const std::string what = std::string(operation.name) + " (operation " + std::to_string(number) + ")";
    if (!take_back(work)) throw_if_dead();  // the watchdog ended it
    record_->finish(record, false);
    if (result == invalid_argument)
      throw UsageError(place() + ": NCCL refuses " + what + ": " + api_.describe(result), {.rank = options_.rank});
    fail_and_throw(ErrorKind::communicator, place() + ": " + what + " failed: " + api_.describe(result));
  }

  cuda::EventPtr end = device_.take_event();
  cuda.check(cuda.event_record(end.get(), stream), "record a CUDA event");
  if (!capture) {
    std::function<void()> joined;
    if (releases_on_join)
      joined = [weak = weak_from_this(), done = work.get()] {
        if (const auto session = weak.lock()) session->release_buffers(done);
      };
    work->mark_enqueued(stream, std::move(end), std::move(joined));
    return work;
  }
  // It runs when the graph does; events of a capture cannot be asked.
  std::optional<Pending> captured = take_back(work);
  if (captured && stream == stream_) {
    std::lock_guard lock(mutex_);
    captured_.push_back({number, *capture, std::move(captured->buffers)});
  }
  work->mark_captured(stream, std::move(end), [weak = weak_from_this(), number, capture] {
    if (const auto session = weak.lock()) session->release_captured(number, capture);
  });
  return work;
}

void Session::call(const char* what, const std::function<Result(Comm comm)>& function) {
  throw_if_dead();
  const cuda::CurrentDevice current(device_);
  const auto alone = enter(what, Clock::now() + patience_with_nccl);
  const Result result = function(comm_);
  if (result != success)
    throw UsageError(place() + ": " + what + " failed: " + api_.describe(result), {.rank = options_.rank});
}

}  // namespace holmes::nccl
