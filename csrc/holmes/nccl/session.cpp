#include "holmes/nccl/session.hpp"

#include <algorithm>
#include <cstddef>
#include <thread>

#include "holmes/core/env.hpp"
#include "holmes/core/log.hpp"
#include "holmes/nccl/watchdog.hpp"
#include "holmes/record/dump.hpp"

namespace holmes::nccl {
namespace {

constexpr auto poll_pause = std::chrono::microseconds(20);  // between two questions whether a call is done
constexpr auto error_check_interval = std::chrono::milliseconds(50);
constexpr auto patience_with_nccl = std::chrono::seconds(10);  // for a thread inside NCCL, before an abort is given up
constexpr auto orderly_end_time = std::chrono::seconds(2);

constexpr int shrink_default = 0, shrink_abort = 1;  // NCCL_SHRINK_DEFAULT, NCCL_SHRINK_ABORT

std::string seconds_text(Duration time) {
  std::string text = std::to_string(std::chrono::duration<double>(time).count());
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text + " s";
}

}  // namespace

Session::Session(const Api& api, cuda::Device& device, SessionOptions options)
    : api_(api), device_(device), options_(std::move(options)) {
  record_ = std::make_shared<SessionRecord>(options_.name, options_.rank, options_.size,
                                            Env::read().flight_recorder_operations);
  const cuda::CurrentDevice current(device_);
  stream_ = device_.make_stream();
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
  // In order: finalize tells the peers, destroy is local then. Another thread, as either may wait for a peer.
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto end = std::make_shared<End>();
  std::thread([&api = api_, &device = device_, comm = comm_.load(), stream = stream_, end] {
    try {
      const cuda::CurrentDevice current(device);
      std::unique_lock issue(device.issue);
      Result state = api.comm_finalize(comm);
      for (const auto until = Clock::now() + orderly_end_time; state == in_progress && Clock::now() < until;) {
        std::this_thread::sleep_for(poll_pause);
        if (api.comm_get_async_error(comm, &state) != success) break;
      }
      if (state == success)
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
  // A thread that is inside NCCL with this communicator sees that it is dead and leaves, unless NCCL itself hangs.
  // Everything the thread needs outlives the session.
  std::thread([&device = device_, &api = api_, comm = &comm_, stream = stream_, name = place(),
               self = weak_from_this().lock(), held = comm_.load(), pending = std::move(pending)] {
    std::unique_lock issue(device.issue, std::defer_lock);
    if (!issue.try_lock_for(patience_with_nccl)) {
      log(LogLevel::error, std::nullopt,
          name + ": NCCL does not return from a call, so that its communicator cannot be aborted; it is left behind");
      return;
    }
    try {
      const cuda::CurrentDevice current(device);
      // Set-up may have made it since.
      const Comm end = self ? comm->exchange(nullptr) : held;
      if (end != nullptr) api.comm_abort(end);
      cuda::driver().stream_destroy(stream);
    } catch (const HolmesError& error) {
      log(LogLevel::warn, std::nullopt, name + ": " + error.what());
    }
  }).detach();
}

void Session::check_async_error() {
  std::unique_lock issue(device_.issue, std::try_to_lock);
  const Comm comm = comm_;
  if (!issue || comm == nullptr || dead_) return;
  Result error = success;
  const Result asked = api_.comm_get_async_error(comm, &error);
  issue.unlock();
  if (asked != success) error = asked;
  if (error == success || error == in_progress) return;
  fail({ErrorKind::communicator,
        place() + ": NCCL reports an error: " + api_.describe(error),
        {.rank = options_.rank, .host = options_.host}});
}

bool Session::poll() {
  if (dead_) return false;
  std::string late;
  try {
    while (true) {
      std::shared_ptr<NcclWork> first;
      {
        std::lock_guard lock(mutex_);
        if (pending_.empty()) break;
        first = pending_.front().work;
        if (Clock::now() >= pending_.front().deadline)
          late = std::string(pending_.front().name) + " (operation " + std::to_string(pending_.front().number) + ")";
      }
      // Without the lock: a work's callbacks may call the session, freeing a buffer may need Python's lock.
      if (!first->poll()) break;
      late.clear();
      std::optional<Pending> finished;  // ends after the lock
      std::lock_guard lock(mutex_);
      if (!pending_.empty() && pending_.front().work == first) {
        finished = std::move(pending_.front());
        pending_.pop_front();
        record_->finish(finished->record, true);
      }
    }
  } catch (const HolmesError& error) {
    fail({error.kind(), place() + ": " + error.what(), error.context()});
    return false;
  }
  std::optional<Failure> end;
  {
    std::lock_guard lock(mutex_);
    if (left_ && !pending_.empty() && Clock::now() >= end_expected_) end = failure_;
  }
  if (end) {
    fail(*end);
    return false;
  }
  if (!late.empty()) {
    fail({ErrorKind::timeout,
          place() + ": " + late + " is not finished at its deadline; a peer does not take part, or a link is down",
          {.rank = options_.rank, .host = options_.host}});
    return false;
  }
  if (const auto now = Clock::now(); now >= next_error_check_) {
    next_error_check_ = now + error_check_interval;
    check_async_error();
  }
  std::lock_guard lock(mutex_);
  return !pending_.empty();
}

Result Session::wait_while_in_progress(const char* what, Result result, Clock::time_point deadline) {
  while (result == in_progress) {
    throw_if_dead();
    if (Clock::now() >= deadline)
      fail_and_throw(ErrorKind::timeout, place() + ": " + what + " is not done at its deadline; a peer does not take " +
                                             "part, or cannot be reached over the chosen NICs");
    std::this_thread::sleep_for(poll_pause);
    const Result asked = api_.comm_get_async_error(comm_, &result);
    if (asked != success) return asked;
  }
  return result;
}

Config Session::config() const {
  Config config = make_config(api_.version);
  config.blocking = 0;
  config.net_name = options_.net.c_str();
  // Several communicators of one library on one device run in the order of the calls (2.31 and later; before, images
  // are told so by their environment).
  if (config.size > offsetof(Config, launch_order_implicit)) config.launch_order_implicit = 1;
  return config;
}

void Session::connect(const UniqueId& id, Clock::time_point deadline) {
  Config settings = config();
  const cuda::CurrentDevice current(device_);
  Result result;
  {
    std::unique_lock issue(device_.issue, std::defer_lock);
    if (!issue.try_lock_until(deadline))
      fail_and_throw(ErrorKind::timeout, place() + ": another communicator keeps the device; set-up not begun");
    Comm comm = nullptr;
    result = api_.comm_init_rank_config(&comm, options_.size, id, options_.rank, &settings);
    comm_ = comm;
  }
  // The peers are waited for without the lock: their set-up may need this device's other communicators.
  result = wait_while_in_progress("set-up of NCCL", result, deadline);
  if (result != success)
    fail_and_throw(ErrorKind::communicator, place() + ": NCCL's set-up failed: " + api_.describe(result));
}

std::string Session::connect_shrunk(Session& parent, std::vector<int> excluded, Clock::time_point deadline) {
  Config settings = config();
  const cuda::CurrentDevice current(device_);
  // NCCL may write to it after a deadline of ours: it stays behind then.
  auto* const made = new Comm(nullptr);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_until(deadline))
    fail_and_throw(ErrorKind::timeout, place() + ": another communicator keeps the device; shrinking not begun");
  const Comm old = parent.comm_;
  if (old == nullptr) {
    delete made;
    return "the communicator to shrink has failed";
  }
  const int flags = parent.has_pending() ? shrink_abort : shrink_default;
  Result result = api_.comm_shrink(old, excluded.data(), static_cast<int>(excluded.size()), made, &settings, flags);
  // Until the new one is there, the old one tells how far it is.
  while (result == in_progress && *made == nullptr) {
    if (Clock::now() >= deadline)
      fail_and_throw(ErrorKind::timeout,
                     place() + ": shrinking is not done at its deadline; a rank that stays does not take part");
    std::this_thread::sleep_for(poll_pause);
    Result state = success;
    const Result asked = api_.comm_get_async_error(old, &state);
    if (asked != success || state != in_progress) result = asked != success ? asked : state;
  }
  comm_ = *made;
  issue.unlock();
  delete made;
  if (result == success && comm_.load() == nullptr) return "NCCL made no communicator";
  if (comm_.load() != nullptr && (result == success || result == in_progress))
    result = wait_while_in_progress("shrinking", in_progress, deadline);
  return result == success ? "" : api_.describe(result);
}

// Every stream on which one of the buffers is ready.
void Session::begin_behind(const Operation& operation, cuda::Stream stream) const {
  std::vector<cuda::Stream> seen{stream};
  for (const Buffer& buffer : operation.buffers) {
    if (std::ranges::find(seen, buffer.stream) != seen.end()) continue;
    seen.push_back(buffer.stream);
    const cuda::EventPtr ready = device_.take_event();
    const cuda::Driver& cuda = cuda::driver();
    cuda.check(cuda.event_record(ready.get(), buffer.stream), "record a CUDA event");
    cuda.check(cuda.stream_wait_event(stream, ready.get(), 0), "let NCCL's stream wait");
  }
}

// Side by side, each of two operations may hold what the other needs. Those of one NCCL it orders itself, where it can;
// those of two images, or of one communicator on two streams, nobody else orders.
void Session::keep_order(cuda::Stream stream, const std::optional<unsigned long long>& capture) const {
  const cuda::Device::Last& on_device = capture ? device_.last_captured : device_.last;
  const bool is_ordered = options_.library_orders && on_device.library == &api_;
  const cuda::EventPtr* waited = nullptr;
  for (const cuda::Device::Last* last : {is_ordered ? nullptr : &on_device, capture ? &last_captured_ : &last_}) {
    if (last == nullptr || !last->end || last->stream == stream || (capture && last->capture_id != *capture)) continue;
    if (waited != nullptr && *waited == last->end) continue;
    const cuda::Driver& cuda = cuda::driver();
    cuda.check(cuda.stream_wait_event(stream, last->end.get(), 0), "order NCCL operations on a device");
    waited = &last->end;
  }
}

std::shared_ptr<NcclWork> Session::run(Operation operation) {
  const auto deadline = Clock::now() + operation.timeout;
  throw_if_dead();
  const cuda::Driver& cuda = cuda::driver();
  const cuda::CurrentDevice current(device_);
  const cuda::Stream caller = operation.buffers.empty() ? nullptr : operation.buffers.front().stream;
  auto work = operation.work ? operation.work : std::make_shared<NcclWork>(device_, caller);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_until(deadline))
    fail_and_throw(ErrorKind::timeout, place() + ": " + operation.name + " did not begin within " +
                                           seconds_text(operation.timeout) +
                                           ": another thread is inside NCCL on this device");
  throw_if_dead();
  const auto capture = cuda::capture_of(caller);
  const cuda::Stream stream = operation.on_callers_stream ? caller : stream_;
  begin_behind(operation, stream);
  keep_order(stream, capture);

  ++sequence_;
  const std::uint64_t record = capture ? 0 : record_->begin(operation.name, operation.buffers);
  const auto what = [&] { return std::string(operation.name) + " (operation " + std::to_string(sequence_) + ")"; };
  Result result = api_.group_start();
  if (result == success) {
    result = operation.enqueue(comm_, stream);
    const Result ended = api_.group_end();
    if (result == success || result == in_progress) result = ended;
  }
  if (result == in_progress) result = wait_while_in_progress(what().c_str(), result, deadline);
  if (result != success) record_->finish(record, false);
  if (result == invalid_argument)
    throw UsageError(place() + ": NCCL refuses " + what() + ": " + api_.describe(result), {.rank = options_.rank});
  if (result != success)
    fail_and_throw(ErrorKind::communicator, place() + ": " + what() + " failed: " + api_.describe(result));

  cuda::EventPtr end = device_.take_event();
  cuda.check(cuda.event_record(end.get(), stream), "record a CUDA event");
  if (capture) {
    // It runs when the graph does; events of a capture cannot be asked.
    device_.last_captured = last_captured_ = {&api_, stream, end, *capture};
    work->mark_captured(stream, std::move(end));
    return work;
  }
  device_.last = last_ = {&api_, stream, end, 0};
  work->mark_enqueued(stream, std::move(end));
  const std::uint64_t number = sequence_;
  issue.unlock();
  {
    std::lock_guard lock(mutex_);
    if (dead_) {
      record_->finish(record, false);
      work->fail(error_of(failure_));
      return work;
    }
    pending_.push_back({work, std::move(operation.buffers), deadline, operation.name, number, record});
  }
  wake_watchdog();
  return work;
}

void Session::call(const char* what, const std::function<Result(Comm comm)>& function) {
  throw_if_dead();
  const cuda::CurrentDevice current(device_);
  std::unique_lock issue(device_.issue, std::defer_lock);
  if (!issue.try_lock_for(patience_with_nccl))
    throw TimeoutError(place() + ": " + what + " did not begin within " + seconds_text(patience_with_nccl) +
                           ": another thread is inside NCCL on this device",
                       {.rank = options_.rank, .host = options_.host});
  throw_if_dead();
  const Result result = function(comm_);
  if (result != success)
    throw UsageError(place() + ": " + what + " failed: " + api_.describe(result), {.rank = options_.rank});
}

}  // namespace holmes::nccl
