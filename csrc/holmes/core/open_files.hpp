// How many files (sockets among them) this process may open.
#pragma once

namespace holmes {

// Raises the soft limit of open files (ulimit -n) towards the hard one, to `most_open_files` at most: 1024, the usual
// one, is less than the sockets of many ranks take. Once per process, so that whoever lowers it later is obeyed; where
// the system refuses, nothing changes. Thread-safe.
void raise_open_files_limit() noexcept;

// More would be a trap for programs that walk over all descriptors they could have.
inline constexpr unsigned long most_open_files = 65536;

}  // namespace holmes
