// What the streams of the fake devices hold and when each part of it ran: lines of FAKE_CUDA_TRACE/<process>.trace,
// which tests/helpers/device_trace.py reads. Nothing where FAKE_CUDA_TRACE is not set. Parts of CUDA graphs are left
// out.
//
//   multiprocessors N                      of each device
//   + ID DEVICE STREAM kernel CTAS COMMUNICATOR NAME RANK SIZE PARTS LABEL
//                                          put on a stream; PARTS: all:N, the communicator's Nth collective, or sP:N,
//                                          rP:N, its Nth message to or from rank P, with commas between
//   + ID DEVICE STREAM point|wait POINT    an event's record, a wait for one
//   + ID DEVICE STREAM task LABEL          anything else that takes time
//   r|b|e ID NANOSECONDS CTAS              it is the first of its stream; has so many multiprocessors; has ended
#pragma once

#include <cstdint>
#include <string>

// Its number; 0 where there is no trace.
std::uint64_t fake_trace_add(const void* stream, int device, const std::string& what);
void fake_trace_mark(std::uint64_t number, char what, int ctas = 0);
bool fake_trace_is_on();
