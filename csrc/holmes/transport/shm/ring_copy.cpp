#include "holmes/transport/shm/ring_copy.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

// Below, it makes no difference (measured with cores 250 ns apart).
constexpr std::size_t min_bypass_bytes = 4096;
// A sample takes up to 3 us: a few percent of so many copies.
constexpr unsigned copies_per_sample = 64;
// What an ordinary store may cost more than one around the caches, seconds per byte: the reader gets that back, as it
// finds the line in a cache (measured difference: up to 0.07 ns where cores are near, 0.3 to 0.6 where they are far; on
// average less where the reader sometimes runs on the writer's core).
constexpr double worth_s_per_byte = 0.15e-9;
// A difference counts so much at most, and with this weight in the average: one sample, an interrupt's, decides
// nothing.
constexpr double max_difference_s_per_byte = 0.5e-9;
constexpr double sample_weight = 0.2;

double copy_time_s(std::byte* destination, const std::byte* source, std::size_t bytes, bool bypass_cache) {
  const auto start = std::chrono::steady_clock::now();
  copy_stream(destination, source, bytes, bypass_cache);
  // A locked operation waits for the stores before it, which else take place after the clock is read.
  std::atomic<int> fence{0};
  fence.fetch_add(1, std::memory_order_seq_cst);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

bool StoreChoice::wants_sample(std::size_t bytes) {
  if (bytes < 2 * sample_bytes || ++copies_ < copies_per_sample) return false;
  copies_ = 0;
  return true;
}

void StoreChoice::add_sample(double cached_s, double bypassing_s) {
  const double difference = (cached_s - bypassing_s) / sample_bytes;
  const double limited = std::clamp(difference, -max_difference_s_per_byte, max_difference_s_per_byte);
  difference_s_per_byte_ += sample_weight * (limited - difference_s_per_byte_);
}

bool StoreChoice::bypasses() const { return difference_s_per_byte_ > worth_s_per_byte; }

void RingCopy::operator()(std::byte* destination, const void* source, std::size_t bytes) {
  if (bytes < min_bypass_bytes) return copy_cached(destination, source, bytes);
  const auto* from = static_cast<const std::byte*>(source);
  if (choice_.wants_sample(bytes)) {
    constexpr std::size_t step = StoreChoice::sample_bytes;
    const double cached_s = copy_time_s(destination, from, step, /*bypass_cache=*/false);
    const double bypassing_s = copy_time_s(destination + step, from + step, step, /*bypass_cache=*/true);
    choice_.add_sample(cached_s, bypassing_s);
    destination += 2 * step;
    from += 2 * step;
    bytes -= 2 * step;
  }
  copy_stream(destination, from, bytes, bytes >= min_bypass_bytes && choice_.bypasses());
}

}  // namespace holmes
