// event_fd: an event descriptor, non-blocking and closed on exec.
#pragma once

#include "holmes/core/unique_fd.hpp"

namespace holmes {

// Throws SystemError.
UniqueFd event_fd();

}  // namespace holmes
