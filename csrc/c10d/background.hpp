// run_in_background: a thread for callbacks that may block.
#pragma once

#include <functional>

namespace holmes::torch_backend {

// Runs `task` soon, in a thread of this process that no earlier task blocks: a future's callbacks are user code (a DDP
// communication hook may wait for another collective, or for the GIL) and must stop neither the engine nor each other.
void run_in_background(std::function<void()> task);

}  // namespace holmes::torch_backend
