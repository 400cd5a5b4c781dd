// The CUDA kernels' own code, compiled for the host and run thread by thread: bits, indices, alignments, tables.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "kernels/bucket_move.hpp"
#include "kernels/shard_sum_chunk.hpp"
#include "kernels/squared_norm.hpp"

using namespace holmes;
using namespace holmes::kernels;
using namespace holmes::test;

namespace {

constexpr float guard = 12345;

// Runs `thread_body(thread)` for every thread of a block.
template <typename Body>
void for_each_thread(Body thread_body) {
  for (unsigned i = 0; i < block_threads; ++i) thread_body(Thread{i, block_threads});
}

template <typename T>
T element(float value) {
  T to;
  from_float(value, to);
  return to;
}

float number(std::size_t at) { return static_cast<float>(at % 509) / 16 - 15; }

// Every 16-bit pattern, and what lies half way between neighbours and just beside that.
template <typename T>
void check_conversions(std::uint32_t infinity) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const T value{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if ((bits & 0x7fff) > infinity) {
      CHECK(std::isnan(wide) && std::isnan(to_float(element<T>(wide))));
      continue;
    }
    CHECK(element<T>(wide).bits == bits);
    if ((bits & 0x7fff) >= infinity - 1) continue;
    const float next = to_float(T{static_cast<std::uint16_t>(bits + 1)});
    const float middle = wide + (next - wide) / 2;
    const float outside = std::copysign(std::numeric_limits<float>::infinity(), wide);
    CHECK(element<T>(middle).bits == (bits % 2 == 0 ? bits : bits + 1));
    CHECK(element<T>(std::nextafter(middle, outside)).bits == bits + 1);
    CHECK(element<T>(std::nextafter(middle, 0.0f)).bits == bits);
  }
  const float largest = to_float(T{static_cast<std::uint16_t>(infinity - 1)});
  CHECK(element<T>(largest).bits == infinity - 1);
  CHECK(element<T>(std::numeric_limits<float>::infinity()).bits == infinity);
  CHECK(element<T>(-std::numeric_limits<float>::infinity()).bits == (infinity | 0x8000));
  CHECK(std::isnan(to_float(element<T>(std::nanf("")))));
}

void check_known_values() {
  CHECK(to_float(Half{0x3c00}) == 1 && to_float(Half{0x0001}) == std::ldexp(1.0f, -24));
  CHECK(to_float(Half{0x7bff}) == 65504 && std::isinf(to_float(Half{0x7c00})));
  CHECK(element<Half>(65519).bits == 0x7bff && element<Half>(65520).bits == 0x7c00);
  CHECK(element<Half>(std::ldexp(1.0f, -25)).bits == 0 && element<Half>(std::ldexp(1.1f, -25)).bits == 1);
  CHECK(to_float(BFloat16{0x3f80}) == 1 && to_float(BFloat16{0xc040}) == -3);
}

// A chunk between two arrays that begin at every alignment, of every size up to two rounds of vectors and around a
// whole chunk. Every element is moved once, nothing else is touched.
template <bool adds, typename To, typename From>
void check_move_chunk() {
  std::vector<unsigned> counts{0, 1, 7, 8, 9, 15, 16, 17, 63, 255, 257, 2047, 2049, chunk_elements - 1, chunk_elements};
  std::vector<From> from(chunk_elements + 64);
  std::vector<To> to(chunk_elements + 64);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = element<From>(number(i));
  for (unsigned to_offset = 0; to_offset < 9; to_offset += 1)
    for (const unsigned from_offset : {to_offset, 0u, 3u})
      for (const unsigned count : counts) {
        for (To& one : to) one = element<To>(guard);
        for_each_thread([&](Thread thread) {
          move_chunk<adds>(thread, to.data() + to_offset, from.data() + from_offset, count, 0.5f);
        });
        const float kept = to_float(element<To>(guard));
        for (std::size_t i = 0; i < to.size(); ++i) {
          const bool is_moved = i >= to_offset && i - to_offset < count;
          const float moved = is_moved ? to_float(from[i - to_offset + from_offset]) * 0.5f : 0;
          const float wanted = !is_moved ? kept : adds ? moved + kept : moved;
          CHECK(to_float(to[i]) == to_float(element<To>(wanted)));
        }
      }
}

// More segments than one launch takes, empty and misaligned ones among them.
template <Move kind, typename Tensor, typename Bucket>
void check_batches() {
  std::vector<std::vector<Tensor>> tensors;
  std::vector<PackSegment> segments;
  std::size_t total = 0;
  for (std::size_t i = 0; i < 2 * max_segments + 44; ++i) {
    const std::size_t count = i % 7 == 0 ? 0 : i % 50 == 1 ? 2 * chunk_elements + i : i * 8 % 777;
    tensors.emplace_back(count + 2, element<Tensor>(guard));
    for (std::size_t k = 0; k < count; ++k) tensors.back()[k + i % 2] = element<Tensor>(number(total + k));
    segments.push_back({tensors.back().data() + i % 2, count, total + 1});
    total += count;
  }
  std::vector<Bucket> bucket(total + 2, element<Bucket>(kind == Move::unpack ? 0.25f : 1));
  CHECK(mistake_in(bucket.data(), bucket.size(), sizeof(Bucket), segments.data(), segments.size(), sizeof(Tensor))
            .empty());
  int launches = 0;
  const int code = in_batches(segments.data(), segments.size(), 0, [&](const MoveBatch& batch) {
    ++launches;
    CHECK(batch.table.count <= max_segments && batch.table.chunks > 0);
    for (unsigned chunk = 0; chunk < batch.table.chunks; ++chunk)
      for_each_thread([&](Thread thread) { move_in_batch<kind, Tensor>(thread, chunk, batch, bucket.data(), 2.0f); });
    return 0;
  });
  CHECK(code == 0 && launches == 3);
  for (std::size_t i = 0; i < segments.size(); ++i)
    for (std::size_t k = 0; k < segments[i].count; ++k) {
      const float before = to_float(element<Tensor>(number(segments[i].bucket_offset - 1 + k)));
      const float in_bucket = to_float(bucket[segments[i].bucket_offset + k]);
      const float in_tensor = to_float(static_cast<Tensor*>(segments[i].tensor)[k]);
      if (kind == Move::unpack)
        CHECK(in_tensor == 0.5f && in_bucket == 0.25f);
      else
        CHECK(in_tensor == before &&
              in_bucket == to_float(element<Bucket>(2 * before + (kind == Move::accumulate ? 1 : 0))));
    }
  const float edge = kind == Move::unpack ? 0.25f : 1;
  CHECK(to_float(bucket.front()) == edge && to_float(bucket.back()) == edge);
  CHECK(in_batches(segments.data(), segments.size(), 0, [](const MoveBatch&) { return 7; }) == 7);
  CHECK(in_batches(static_cast<const PackSegment*>(nullptr), 0, 0, [](const MoveBatch&) { return 7; }) == 0);
}

void check_mistakes() {
  alignas(16) float memory[8] = {};
  const auto reason = [&](PackSegment segment) { return mistake_in(memory, 8, 4, &segment, 1, 4); };
  CHECK(reason({memory, 8, 0}).empty() && reason({nullptr, 0, 8}).empty());
  CHECK(reason({memory, 4, 5}).find("beyond the bucket of 8") != std::string::npos);
  CHECK(reason({memory, SIZE_MAX, 1}).find("beyond") != std::string::npos);
  CHECK(reason({nullptr, 1, 0}).find("is null") != std::string::npos);
  CHECK(reason({reinterpret_cast<char*>(memory) + 2, 1, 0}).find("aligned") != std::string::npos);
  CHECK(mistake_in(memory, 8, 4, nullptr, 1, 4).find("segments is null") != std::string::npos);
}

template <typename Output, typename Input>
void check_shard_sum() {
  constexpr std::size_t count = chunk_elements + 1001;
  for (const int shards : {1, 2, 5, max_shards})
    for (const std::size_t misplaced : {0, 1, 2}) {  // shards that are aligned unlike the output
      std::vector<std::vector<Input>> memory(static_cast<std::size_t>(shards));
      ShardBatch batch{};
      batch.shards = shards;
      for (int s = 0; s < shards; ++s) {
        auto& shard = memory[static_cast<std::size_t>(s)];
        const std::size_t offset = static_cast<std::size_t>(s) < misplaced ? 3 : 0;
        shard.resize(count + offset);
        for (std::size_t i = 0; i < count; ++i)
          shard[i + offset] = element<Input>(number(i + 31 * static_cast<std::size_t>(s)));
        batch.shard[s] = reinterpret_cast<const char*>(shard.data() + offset);
      }
      std::vector<Output> output(count + 1, element<Output>(guard));
      for (std::size_t begin = 0; begin < count; begin += chunk_elements)
        for_each_thread([&](Thread thread) {
          sum_chunk<Output, Input>(thread, begin, chunk_count(begin, count), batch, output.data(), 0.25f);
        });
      for (std::size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int s = 0; s < shards; ++s) sum += to_float(reinterpret_cast<const Input*>(batch.shard[s])[i]);
        CHECK(to_float(output[i]) == to_float(element<Output>(sum * 0.25f)));
      }
      CHECK(to_float(output.back()) == to_float(element<Output>(guard)));
    }
}

template <typename T>
double norm_of(const std::vector<NormTensor>& tensors) {
  double total = 0;
  norm_in_batches(tensors.data(), tensors.size(), 0, [&](const NormBatch& batch) {
    for (unsigned chunk = 0; chunk < batch.table.chunks; ++chunk)
      for_each_thread([&](Thread thread) { total += square_chunk<T>(thread, chunk, batch); });
    return 0;
  });
  return total;
}

template <typename T>
void check_squared_norm() {
  std::vector<std::vector<T>> memory;
  std::vector<NormTensor> tensors;
  double wanted = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    const std::size_t count = i % 9 == 0 ? 0 : i % 60 == 1 ? 2 * chunk_elements + i : i * 5;
    const float weight = i % 3 == 0 ? 0.5f : 1;
    memory.emplace_back(count + 1);
    for (std::size_t k = 0; k < count; ++k) {
      const T value = element<T>(number(i + k));
      memory.back()[k + i % 2] = value;
      wanted += weight * static_cast<double>(to_float(value)) * to_float(value);
    }
    tensors.push_back({memory.back().data() + i % 2, count, weight});
  }
  CHECK(std::abs(norm_of<T>(tensors) / wanted - 1) < 1e-6);
  int launches = 0;
  norm_in_batches(tensors.data(), 0, 0, [&](const NormBatch&) { return launches++, 0; });
  CHECK(launches == 1);  // so that the result is written

  // Not finite in any place, too large and too small for float32 squares.
  std::vector<T> one(4099, element<T>(1));
  for (const std::size_t place : {0, 5, 2048, 4098}) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      one[place] = element<T>(bad);
      CHECK(!std::isfinite(norm_of<T>({{one.data(), one.size(), 1}})));
    }
    one[place] = element<T>(1);
  }
  CHECK(norm_of<T>({{one.data(), one.size(), 1}}) == 4099);
  const bool is_half = std::is_same_v<T, Half>;
  for (const float value : is_half ? std::vector<float>{60000, 6e-8f} : std::vector<float>{1e30f, 1e-30f, 1e38f}) {
    const double stored = to_float(element<T>(value));
    const std::vector<T> same(100, element<T>(value));
    CHECK(std::abs(norm_of<T>({{same.data(), same.size(), 1}}) / (100 * stored * stored) - 1) < 1e-6);
  }
}

}  // namespace

int main() {
  check_known_values();
  check_conversions<Half>(0x7c00);
  check_conversions<BFloat16>(0x7f80);
  check_move_chunk<false, float, float>();
  check_move_chunk<false, BFloat16, float>();
  check_move_chunk<false, float, BFloat16>();
  check_move_chunk<false, Half, BFloat16>();
  check_move_chunk<true, float, Half>();
  check_move_chunk<true, float, float>();
  check_batches<Move::pack, float, BFloat16>();
  check_batches<Move::pack, Half, Half>();
  check_batches<Move::unpack, float, BFloat16>();
  check_batches<Move::unpack, BFloat16, float>();
  check_batches<Move::accumulate, BFloat16, float>();
  check_mistakes();
  check_shard_sum<float, BFloat16>();
  check_shard_sum<BFloat16, BFloat16>();
  check_shard_sum<Half, float>();
  check_squared_norm<float>();
  check_squared_norm<Half>();
  check_squared_norm<BFloat16>();
  return result("kernels");
}
