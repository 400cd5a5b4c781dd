#include "access_order.hpp"

#include <algorithm>
#include <string>

#include "fake_cuda.hpp"

void merge(StreamClock& into, const StreamClock& more) {
  for (const auto& [stream, number] : more) into[stream] = std::max(into[stream], number);
}

void AccessOrder::add(const void* stream, unsigned long long begin, std::size_t bytes, bool writes, const char* what) {
  if (bytes == 0) return;
  std::lock_guard lock(mutex_);
  StreamClock& clock = clocks_[stream];
  merge(clock, host_);
  const Access added{begin, begin + bytes, writes, stream, ++clock[stream], what};
  for (const Access& earlier : accesses_) {
    const bool meets = earlier.begin < added.end && added.begin < earlier.end && (earlier.writes || writes);
    if (meets && clock[earlier.stream] < earlier.number)
      fake_cuda_misuse(
          (std::string("no event orders ") + what + " behind " + earlier.what + " of the same memory").c_str());
  }
  // What is ordered before an access that covers it needs no look any more; reads are kept apart from each other.
  std::erase_if(accesses_, [&](const Access& earlier) {
    const bool is_covered = added.begin <= earlier.begin && earlier.end <= added.end;
    return is_covered && (writes || (!earlier.writes && earlier.stream == stream));
  });
  accesses_.push_back(added);
}

StreamClock AccessOrder::now(const void* stream) {
  std::lock_guard lock(mutex_);
  StreamClock clock = clocks_[stream];
  merge(clock, host_);
  return clock;
}

void AccessOrder::wait(const void* stream, const StreamClock& point) {
  std::lock_guard lock(mutex_);
  merge(clocks_[stream], point);
}

void AccessOrder::host_waits(const StreamClock& point) {
  std::lock_guard lock(mutex_);
  merge(host_, point);
}

void AccessOrder::forget(unsigned long long begin, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  std::erase_if(accesses_, [&](const Access& one) {
    return one.begin < begin + std::max<std::size_t>(bytes, 1) && begin < one.end;
  });
}
