// AccessOrder: which accesses to "device" memory events order, as vector clocks. Two accesses of which one writes and
// that nothing orders are an error, in whichever order they happen to run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

// How much of each stream comes before a point.
using StreamClock = std::map<const void*, std::uint64_t>;

void merge(StreamClock& into, const StreamClock& more);

// Thread-safe; streams are named by their addresses. Of a CUDA graph each part is a stream of its own with each launch.
// Not seen: what the host itself reads and writes of "device" memory without a call.
class AccessOrder {
public:
  // Ends the process where an earlier access of the same memory is not ordered before this one of `stream`.
  void add(const void* stream, unsigned long long begin, std::size_t bytes, bool writes, const char* what);
  StreamClock now(const void* stream);
  void wait(const void* stream, const StreamClock& point);
  // The host has seen that point: what it puts on any stream from now on is behind it.
  void host_waits(const StreamClock& point);
  // The memory is another's from now on.
  void forget(unsigned long long begin, std::size_t bytes);

private:
  struct Access {
    unsigned long long begin, end;
    bool writes;
    const void* stream;
    std::uint64_t number;  // in its stream
    const char* what;
  };
  std::mutex mutex_;
  std::map<const void*, StreamClock> clocks_;
  StreamClock host_;
  std::vector<Access> accesses_;  // the last ones of each piece of memory
};
