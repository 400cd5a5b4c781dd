// What the fake NCCL needs of the fake CUDA driver beside the driver's own interface.
#pragma once

#include <array>
#include <functional>

// Runs `task` on the stream (null: the default one of this thread's device), in its order.
void fake_cuda_enqueue(void* stream, std::function<void()> task);
