// Where the Python threads of this process are, for the flight record.
#pragma once

#include <string>

#include "holmes/core/work.hpp"

namespace holmes {

// What holmes_comm.recorder.stacks_json says; an empty array where the interpreter lets nobody in for `patience`:
// some thread is in native code that keeps its lock. Called without that lock.
std::string python_stacks(Duration patience);

}  // namespace holmes
