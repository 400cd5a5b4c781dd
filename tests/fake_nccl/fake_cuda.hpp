// What the fake NCCL needs of the fake CUDA driver beside the driver's own interface.
#pragma once

#include <array>
#include <cstddef>
#include <functional>

// Runs `task` on the stream (null: the default one of this thread's device), in its order.
void fake_cuda_enqueue(void* stream, std::function<void()> task);
// Whether what is put on the stream becomes part of a graph instead of running.
bool fake_cuda_is_capturing(void* stream);
// Number of the device whose context is current.
int fake_cuda_device();
// Notes that a kernel of `owner` runs on the device, for fake_cuda_most_owners.
void fake_cuda_begin_kernel(int device, const void* owner);
void fake_cuda_end_kernel(int device, const void* owner);

// What the driver would do silently wrong ends the process here, with this text on stderr.
[[noreturn]] void fake_cuda_misuse(const char* text);
// Ends the process where this thread is inside a function of cuLaunchHostFunc, which must not call the driver.
void fake_cuda_check_call();
// Whether a context is this thread's current one.
bool fake_cuda_has_context();
// Whether these bytes are in one allocated block of "device" memory.
bool fake_cuda_is_allocated(unsigned long long address, std::size_t bytes);
