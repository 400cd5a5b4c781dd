#include "holmes/transport/ring_copy.hpp"

#include <atomic>
#include <chrono>

#include "holmes/reduce/copy.hpp"

namespace holmes {
namespace {

// Below, it makes no difference (measured with cores 250 ns apart).
constexpr std::size_t min_bypass_bytes = 4096;
// A sample takes up to 3 us: a few percent of so many copies.
constexpr unsigned copies_per_sample = 64;
// One may be an interrupt's.
constexpr unsigned samples_to_change = 2;
// What an ordinary store may cost more than one around the caches: the reader gets that back, as it finds the line in a
// cache (measured difference: up to 0.1 ns a byte where cores are near, 0.3 to 0.6 where they are far).
constexpr double worth_s_per_byte = 0.25e-9;

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
  const bool bypass = cached_s - bypassing_s > worth_s_per_byte * sample_bytes;
  disagreeing_ = bypass == bypasses_ ? 0 : disagreeing_ + 1;
  if (disagreeing_ < samples_to_change) return;
  bypasses_ = bypass;
  disagreeing_ = 0;
}

void RingCopy::operator()(std::byte* destination, const void* source, std::size_t bytes) {
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
  copy_stream(destination, from, bytes, choice_.bypasses() && bytes >= min_bypass_bytes);
}

}  // namespace holmes
