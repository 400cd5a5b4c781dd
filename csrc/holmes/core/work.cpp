#include "holmes/core/work.hpp"

#include <array>
#include <charconv>
#include <map>

#include "holmes/core/error.hpp"
#include "holmes/core/interrupt.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/no_memory.hpp"

namespace holmes {

namespace {

// To the millisecond: "1.5 s".
std::string seconds_text(Duration duration) {
  std::array<char, 32> text;
  const auto milliseconds = std::chrono::round<std::chrono::milliseconds>(duration);
  const double seconds = std::chrono::duration<double>(milliseconds).count();
  const auto end = std::to_chars(text.data(), text.data() + text.size(), seconds).ptr;
  return std::string(text.data(), end) + " s";
}

}  // namespace

std::string_view name(WorkState state) {
  switch (state) {
    case WorkState::queued:
      return "queued";
    case WorkState::running:
      return "running";
    case WorkState::completed:
      return "completed";
    case WorkState::failed:
      return "failed";
  }
  return "unknown";
}

void Work::wait(std::optional<Duration> timeout) {
  await_final(timeout, timeout ? Clock::now() : Clock::time_point{});
  if (state() == WorkState::failed) std::rethrow_exception(error());
}

void Work::await_final(std::optional<Duration> timeout, Clock::time_point since) {
  if (is_final()) return;
  mark_awaited();
  const auto until = timeout ? std::optional(since + *timeout) : std::nullopt;
  while (true) {
    if (await_final_until(earliest({until, SignalTimer().due()}))) return;
    if (until && Clock::now() >= *until)
      throw TimeoutError("the operation is not finished after the " + seconds_text(*timeout) +
                         " given to wait; it goes on, its buffers are still in use: wait again or abort");
    look_for_signals();
  }
}

bool Work::await_final_until(std::optional<Clock::time_point> until) {
  std::unique_lock lock(mutex_);
  const auto is_done = [this] { return is_final(); };
  if (until) return final_.wait_until(lock, *until, is_done);
  final_.wait(lock, is_done);
  return true;
}

void Work::look_for_signals() {
  constexpr std::chrono::seconds patience{5};  // an abandoned work fails at once, where its driver is not stuck
  try {
    check_signals();
  } catch (const Interrupted& interrupted) {
    if (!is_final()) {
      abandon(std::string("it was interrupted by ") + interrupted.what());
      await_final_until(Clock::now() + patience);
    }
    throw;
  }
}

std::exception_ptr Work::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

Duration Work::elapsed() const {
  std::lock_guard lock(mutex_);
  return finished_.value_or(Clock::now()) - submitted_;
}

void Work::on_final(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!is_final()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Work::mark_running() {
  WorkState expected = WorkState::queued;
  state_.compare_exchange_strong(expected, WorkState::running);
}

void Work::complete(Clock::time_point now) { finish(WorkState::completed, nullptr, now); }
void Work::fail(std::exception_ptr error, Clock::time_point now) { finish(WorkState::failed, std::move(error), now); }

void Work::finish(WorkState state, std::exception_ptr error, Clock::time_point now) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (is_final()) return;
    error_ = std::move(error);
    finished_ = now;
    callbacks.swap(callbacks_);
    state_.store(state, std::memory_order_release);
    final_.notify_all();
  }
  for (auto& callback : callbacks) {
    try {
      callback();
    } catch (const std::exception& problem) {  // the others are due all the same
      where_memory_allows([&] {
        log(LogLevel::error, std::nullopt, std::string("what follows an operation's end failed: ") + problem.what());
      });
    }
  }
}

std::shared_ptr<Work> completed_work(int source) {
  static std::mutex& mutex = *new std::mutex;
  static auto& works = *new std::map<int, std::unique_ptr<Work>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Work>& work = works[source];
  if (!work) {
    work = std::make_unique<Work>();
    work->set_source_rank(source);
    work->complete();
  }
  return {std::shared_ptr<Work>(), work.get()};
}

void await_all_final(std::span<const std::shared_ptr<Work>> works) {
  for (const auto& work : works) work->await_final();
}

}  // namespace holmes
