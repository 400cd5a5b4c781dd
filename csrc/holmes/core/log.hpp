// Log: levelled lines on stderr. HOLMES_LOG chooses the level.
#pragma once

#include <optional>
#include <string>

namespace holmes {

enum class LogLevel : int { error = 0, warn = 1, info = 2, debug = 3 };

// "error", "warn", "info", "debug"; nothing for any other text.
std::optional<LogLevel> log_level_from_name(const std::string& text);
// True where a line of `level` is written: use it where making the text is costly.
bool log_enabled(LogLevel level);
// Changes the level of this process (starts as HOLMES_LOG says, else warn).
void set_log_level(LogLevel level);

// This process's number in the job, for the prefix of every line from now on. Until then it is the rank that `log` is
// given: the rank in the communicator that the line is about.
void set_log_rank(int job_rank);

// Writes "[holmes rank 3/host] warn: text" in one piece; no rank known: "[holmes host] ...". Thread-safe, never throws.
void log(LogLevel level, std::optional<int> rank, const std::string& text) noexcept;

// Of what strangers can cause as often as they like: a warning 20 times a minute in this process, then at level debug.
void log_of_stranger(std::optional<int> rank, const std::string& text);

}  // namespace holmes
