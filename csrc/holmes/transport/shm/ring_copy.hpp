// RingCopy: copies into memory that another processor core reads and that is written again and again, as a ring's is.
#pragma once

#include <cstddef>

namespace holmes {

// Which stores a ring's writer uses. A line that the reader still holds in its cache has to be taken from there before
// an ordinary store. Where the two cores share no cache (other sockets, other core complexes; a virtual machine's
// processors change from one second to the next) that costs several times what a store around the caches does, and
// where they do, less than the reader then loses. (Measured on 2 cores of Zen 4, GB/s of writing and reading 32 KiB in
// turns: cores 50 ns apart 7 to 20 and 35, around the caches 33 and 12; cores 250 ns apart 1.7 and 12, around the
// caches 33 and 14.) So some copies are timed both ways.
class StoreChoice {
public:
  // Bytes timed each way.
  static constexpr std::size_t sample_bytes = 4096;

  // Whether stores go around the caches.
  bool bypasses() const;
  // Whether the next copy, of `bytes`, is to be timed.
  bool wants_sample(std::size_t bytes);
  // What `sample_bytes` took each way, seconds.
  void add_sample(double cached_s, double bypassing_s);

private:
  unsigned copies_ = 0;               // since the last sample
  double difference_s_per_byte_ = 0;  // what ordinary stores cost more, on average over the last samples
};

class RingCopy {
public:
  // memcpy; a release store after it publishes the copy. The regions must not overlap.
  void operator()(std::byte* destination, const void* source, std::size_t bytes);

private:
  StoreChoice choice_;
};

}  // namespace holmes
