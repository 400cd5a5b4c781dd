// libholmes_cuda's whole source on the host (cuda_on_host): what each function writes, by its C interface.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"
#include "kernels/element.hpp"
#include "kernels/interface.hpp"

using namespace holmes;
using namespace holmes::kernels;
using namespace holmes::test;

namespace {

template <typename T>
constexpr DType dtype = std::is_same_v<T, float>  ? DType::float32
                        : std::is_same_v<T, Half> ? DType::float16
                                                  : DType::bfloat16;

template <typename T>
T element(float value) {
  T to;
  from_float(value, to);
  return to;
}

float number(std::size_t at) { return static_cast<float>(at % 509) / 16 - 15; }

// More tensors than a launch takes, each in memory of its own of exactly its size; every third begins an element late.
template <typename T>
struct Tensors {
  std::vector<std::vector<T>> memory;
  std::vector<PackSegment> segments;
  std::size_t total = 0;

  Tensors() {
    for (std::size_t i = 0; i < 270; ++i) {
      const std::size_t count = i % 9 == 0 ? 0 : i % 60 == 1 ? 20000 + i : i * 5 % 333;
      const std::size_t skipped = i % 3 == 0 ? 1 : 0;
      memory.emplace_back(count + skipped);
      for (std::size_t k = 0; k < count; ++k) memory.back()[k + skipped] = element<T>(number(total + k));
      segments.push_back({memory.back().data() + skipped, count, total});
      total += count;
    }
  }
};

template <typename T, typename B>
void check_moves() {
  Tensors<T> tensors;
  std::vector<B> bucket(tensors.total, element<B>(1));
  const auto call = [&](auto function, float scale) {
    return function(bucket.data(), bucket.size(), dtype<B>, tensors.segments.data(), tensors.segments.size(), dtype<T>,
                    scale, nullptr);
  };
  CHECK(call(holmes_cuda_pack, 2.0f) == 0);
  for (std::size_t i = 0; i < tensors.total; ++i)
    CHECK(to_float(bucket[i]) == to_float(element<B>(2 * to_float(element<T>(number(i))))));
  const std::vector<B> packed = bucket;
  if constexpr (std::is_same_v<B, float>) {
    CHECK(call(holmes_cuda_accumulate, 3.0f) == 0);
    for (std::size_t i = 0; i < tensors.total; ++i) CHECK(bucket[i] == packed[i] + 3 * to_float(element<T>(number(i))));
  }
  CHECK(call(holmes_cuda_unpack, 0.5f) == 0);
  for (const PackSegment& segment : tensors.segments)
    for (std::size_t k = 0; k < segment.count; ++k)
      CHECK(to_float(static_cast<T*>(segment.tensor)[k]) ==
            to_float(element<T>(0.5f * to_float(bucket[segment.bucket_offset + k]))));
}

template <typename Output, typename Input>
void check_sum() {
  constexpr std::size_t count = 20001;
  for (const std::size_t shards : {1, 3, 16}) {
    std::vector<std::vector<Input>> memory(shards, std::vector<Input>(count));
    std::vector<const void*> addresses;
    for (std::size_t s = 0; s < shards; ++s) {
      for (std::size_t i = 0; i < count; ++i) memory[s][i] = element<Input>(number(i + 31 * s));
      addresses.push_back(memory[s].data());
    }
    std::vector<Output> output(count);
    CHECK(holmes_cuda_sum_shards(output.data(), dtype<Output>, addresses.data(), shards, dtype<Input>, count, 0.25f,
                                 nullptr) == 0);
    for (std::size_t i = 0; i < count; ++i) {
      float sum = 0;
      for (const auto& shard : memory) sum += to_float(shard[i]);
      CHECK(to_float(output[i]) == to_float(element<Output>(sum * 0.25f)));
    }
  }
}

template <typename T>
void check_norm() {
  Tensors<T> tensors;
  std::vector<NormTensor> table;
  double wanted = 0;
  for (std::size_t i = 0; i < tensors.segments.size(); ++i) {
    const PackSegment& segment = tensors.segments[i];
    table.push_back({segment.tensor, segment.count, i % 2 == 0 ? 1.0f : 0.5f});
    for (std::size_t k = 0; k < segment.count; ++k) {
      const double value = to_float(static_cast<T*>(segment.tensor)[k]);
      wanted += table.back().weight * value * value;
    }
  }
  std::vector<double> workspace(holmes_cuda_norm_workspace_count(), std::nan(""));  // nothing is expected of it
  double first = 0, again = 0;
  for (double* result : {&first, &again})
    CHECK(holmes_cuda_squared_norm(result, workspace.data(), table.data(), table.size(), dtype<T>, nullptr) == 0);
  CHECK(std::abs(first / wanted - 1) < 1e-6);
  CHECK(std::memcmp(&first, &again, sizeof(first)) == 0);
  CHECK(holmes_cuda_squared_norm(&again, workspace.data(), nullptr, 0, dtype<T>, nullptr) == 0 && again == 0);
  static_cast<T*>(tensors.segments[61].tensor)[20000] = element<T>(std::numeric_limits<float>::infinity());
  CHECK(holmes_cuda_squared_norm(&again, workspace.data(), table.data(), table.size(), dtype<T>, nullptr) == 0);
  CHECK(!std::isfinite(again));
}

void check_mistakes() {
  float memory[8] = {};
  const PackSegment beyond{memory, 4, 5};
  CHECK(holmes_cuda_pack(memory, 8, DType::float32, &beyond, 1, DType::float32, 1, nullptr) != 0);
  CHECK(std::strstr(holmes_cuda_last_error(), "beyond the bucket of 8") != nullptr);
  CHECK(holmes_cuda_sum_shards(memory, DType::float32, nullptr, 0, DType::float32, 8, 1, nullptr) != 0);
  CHECK(std::strstr(holmes_cuda_last_error(), "0 shards") != nullptr);
}

}  // namespace

int main() {
  check_moves<float, BFloat16>();
  check_moves<BFloat16, float>();
  check_moves<Half, Half>();
  check_sum<float, BFloat16>();
  check_sum<BFloat16, float>();
  check_norm<float>();
  check_norm<BFloat16>();
  check_mistakes();
  return result("kernels on the host");
}
