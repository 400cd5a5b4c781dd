#include "holmes/nccl/session.hpp"

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

}  // namespace holmes::nccl
