// What this process's communicators have done and wait for, as JSON: for `holmes debug`, and as a file on failure.
#pragma once

#include <string>

#include "holmes/core/env.hpp"
#include "holmes/core/work.hpp"

namespace holmes {

// The record of this process: an object of kind "holmes-flight-record" (docs/debug.md). Waits so long for the threads
// that drive communicators, and for the stack source; `settle` as in collect_records. Thread-safe, as all here.
std::string process_record_json(const std::string& reason, Duration patience, Duration settle);
// What is worth waiting for where nobody is in a hurry.
inline constexpr auto record_patience = std::chrono::milliseconds(300);
inline constexpr auto record_settle = std::chrono::milliseconds(300);

// Where dumps go; the last call counts.
void set_dump_folder(const std::optional<std::string>& folder);
std::optional<std::string> dump_folder();
bool has_dump_folder();  // takes no memory
// A file in that folder; whoever changes it asks all processes that have the same folder for their dumps.
std::string request_file(const std::string& folder);

// Writes this process's record into the dump folder; does nothing where none is set. What goes wrong is logged. Its
// reason is the last failure of the process, where there was one, else `reason`.
void dump(const std::string& reason) noexcept;
// As dump, and asks the other processes to do the same. Returns when the file is there, or, where the folder does not
// answer, after about half a second.
void dump_on_failure(const std::string& message) noexcept;

// Where the threads of the program are, as a JSON array; it must return after about `patience`. For Python.
using StackSource = std::string (*)(Duration patience);
void set_stack_source(StackSource source);

}  // namespace holmes
