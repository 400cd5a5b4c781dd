#include "holmes/core/log.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>

#include "holmes/core/env.hpp"

namespace holmes {
namespace {

constexpr std::array<const char*, 4> level_names = {"error", "warn", "info", "debug"};

constexpr int no_rank = -1;
std::atomic<int> own_job_rank{no_rank};

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level = [] {
    const char* text = std::getenv("HOLMES_LOG");
    return log_level_from_name(text != nullptr ? text : "").value_or(LogLevel::warn);
  }();
  return level;
}

}  // namespace

std::optional<LogLevel> log_level_from_name(const std::string& text) {
  for (std::size_t i = 0; i < level_names.size(); ++i) {
    if (text == level_names[i]) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

bool log_enabled(LogLevel level) { return level <= current_level().load(std::memory_order_relaxed); }

void set_log_level(LogLevel level) { current_level().store(level, std::memory_order_relaxed); }

void set_log_rank(int job_rank) { own_job_rank.store(job_rank, std::memory_order_relaxed); }

void log(LogLevel level, std::optional<int> rank, const std::string& text) noexcept {
  if (!log_enabled(level)) return;
  try {
    if (const int own = own_job_rank.load(std::memory_order_relaxed); own != no_rank) rank = own;
    std::string line = "[holmes ";
    if (rank) line += "rank " + std::to_string(*rank) + "/";
    line += host_name() + "] " + level_names[static_cast<std::size_t>(level)] + ": " + text + "\n";
    // One write, so that lines of several processes do not mix. A lost log line is no error.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {  // out of memory while logging
  }
}

void log_of_stranger(std::optional<int> rank, const std::string& text) {
  constexpr int most = 20;
  static std::mutex mutex;
  static std::chrono::steady_clock::time_point began{};
  static int used = 0;
  bool is_last = false;
  LogLevel level = LogLevel::debug;
  {
    const std::lock_guard lock(mutex);
    const auto now = std::chrono::steady_clock::now();
    if (now - began >= std::chrono::minutes(1)) began = now, used = 0;
    if (used < most) {
      level = LogLevel::warn;
      is_last = ++used == most;
    }
  }
  log(level, rank, is_last ? text + "; further ones of this minute are logged at level debug" : text);
}

}  // namespace holmes
