// What the fake NCCL needs of the fake CUDA driver beside the driver's own interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// Runs `task` on the stream (null: the default one of this thread's device), in its order.
void fake_cuda_enqueue(void* stream, std::function<void()> task);
// What is put on the stream next reads or writes these bytes of the device; `what` says what it is. Ends the process
// where it is not all allocated, and where nothing orders it behind an earlier access (access_order.hpp).
void fake_cuda_access(void* stream, const void* begin, std::size_t bytes, bool writes, const char* what);
// To be called where the host learns that what the stream has now is done: what it does next is ordered behind that.
std::function<void()> fake_cuda_notice(void* stream);
// Whether what is put on the stream becomes part of a graph instead of running.
bool fake_cuda_is_capturing(void* stream);
// Whether these bytes are page-locked memory.
bool fake_cuda_is_pinned(const void* begin, std::size_t bytes);
// How many multiprocessors each device has.
int fake_cuda_multiprocessors();
// Name of the outermost call of a fake that this thread is in; "" where there is none.
const char* fake_cuda_call();
// Number of the device whose context is current.
int fake_cuda_device();
// A kernel of `owner` begins on the device once `least` multiprocessors are free (all of them, where that is more) and
// the kernels that came before it have begun; takes up to `most`, and keeps them to its end. Returns how many. Says so
// on stderr where it waits for long. `trace`: its number in the trace (device_trace.hpp).
int fake_cuda_begin_kernel(int device, const void* owner, int least, int most, std::uint64_t trace = 0);
void fake_cuda_end_kernel(int device, const void* owner, int ctas);

// Says in the trace what is put on the stream next (device_trace.hpp); its number there.
std::uint64_t fake_cuda_trace(void* stream, int device, const std::string& what);

// What the attribute of this number says of GPUDirect RDMA; 0 where it is of something else.
int fake_cuda_gpu_direct(int attribute);
// Ends the process where an HCA has registered any of it.
void fake_cuda_check_free(unsigned long long address, std::size_t bytes);
// What HCAs have written there, and nobody has seen, is seen by nobody.
void fake_cuda_forget_writes(unsigned long long address, std::size_t bytes);

// Counts what happens, by name, for fake_cuda_count.
void fake_cuda_note(const char* name);

// Counts a call of the driver, of the runtime or of NCCL, for fake_cuda_calls: the outermost one of a thread, as what a
// call makes inside is not its caller's; and the time in it, which is the fakes' and nobody else's.
class FakeCall {
public:
  explicit FakeCall(const char* name);
  FakeCall(const FakeCall&) = delete;
  FakeCall& operator=(const FakeCall&) = delete;
  ~FakeCall();
};

// What the driver would do silently wrong ends the process here, with this text on stderr.
[[noreturn]] void fake_cuda_misuse(const char* text);
// Ends the process where this thread is inside a function of cuLaunchHostFunc, which must not call the driver.
void fake_cuda_check_call();
// Whether the process has come to the driver's end.
bool fake_cuda_has_shut_down();
// Whether a context is this thread's current one.
bool fake_cuda_has_context();
// Whether these bytes are in one allocated block of "device" memory.
bool fake_cuda_is_allocated(unsigned long long address, std::size_t bytes);
