// report_terminate: std::terminate says where, before the process aborts.
#pragma once

namespace holmes {

// From now on the thread, the exception and the C++ stack are written to stderr; then comes what was to come before.
void report_terminate();

}  // namespace holmes
