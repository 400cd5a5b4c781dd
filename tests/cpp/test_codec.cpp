// The codecs: error bounds, what is not finite, error feedback, every length around a block.
#include "holmes/reduce/codec.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"

using namespace holmes;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

std::vector<float> through(Codec codec, const std::vector<float>& values, float* residual = nullptr) {
  std::vector<std::byte> encoded(encoded_bytes(codec, values.size()) + 1);
  encode(codec, values.data(), values.size(), encoded.data() + 1, residual);  // not aligned
  std::vector<float> decoded(values.size());
  decode(codec, encoded.data() + 1, values.size(), decoded.data(), false);
  std::vector<float> twice(values.size());
  decode(codec, encoded.data() + 1, values.size(), twice.data(), true);
  for (std::size_t i = 0; i < values.size(); ++i)
    CHECK(decoded[i] == twice[i] || (std::isnan(decoded[i]) && std::isnan(twice[i])));
  return decoded;
}

float largest_of_block(const std::vector<float>& values, std::size_t i) {
  float largest = 0;
  const std::size_t begin = i / code_block * code_block;
  for (std::size_t k = begin; k < std::min(begin + code_block, values.size()); ++k)
    largest = std::max(largest, std::abs(values[k]));
  return largest;
}

void check_bounds() {
  for (const std::size_t count : {0, 1, 2, 255, 256, 257, 511, 1024, 10007}) {
    const auto values = random_values(count, static_cast<unsigned>(count));
    const auto half = through(Codec::bf16, values);
    const auto byte = through(Codec::int8, values);
    const auto nibble = through(Codec::int4, values);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(std::abs(half[i] - values[i]) <= std::abs(values[i]) / 256);
      CHECK(std::abs(byte[i] - values[i]) <= largest_of_block(values, i) / 127 * 0.5001F);
      CHECK(std::abs(nibble[i] - values[i]) <= largest_of_block(values, i) / 7 * 0.5001F);
    }
  }
  CHECK(encoded_bytes(Codec::bf16, 1000) == 2000);
  CHECK(encoded_bytes(Codec::int8, 512) == 2 * 260);
  CHECK(encoded_bytes(Codec::int8, 513) == 2 * 260 + 5);
  CHECK(encoded_bytes(Codec::int4, 512) == 2 * 132);
  CHECK(encoded_bytes(Codec::int4, 513 + 2) == 2 * 132 + 4 + 2);
}

double error_of(Codec codec, const std::vector<float>& values) {
  const auto found = through(codec, values);
  double sum = 0;
  for (std::size_t i = 0; i < values.size(); ++i) sum += std::pow(double{found[i]} - double{values[i]}, 2);
  return std::sqrt(sum / static_cast<double>(values.size()));
}

// A few large values among many small ones, as gradients have them: the step of integers is that of the largest.
void check_rotation() {
  auto values = random_values(100 * code_block, 5);
  for (std::size_t i = 17; i < values.size(); i += code_block) values[i] = 100;
  for (const auto& [plain, rotated] :
       {std::pair(Codec::int8, Codec::int8_rotated), {Codec::int4, Codec::int4_rotated}}) {
    const double without = error_of(plain, values);
    const double with = error_of(rotated, values);
    std::printf("%s, one of 256 a hundred times the others: error %g, rotated %g\n", std::string(name(plain)).c_str(),
                without, with);
    CHECK(with * 2 < without || plain == Codec::int4);  // int4 loses all but the large ones: an error of 1
    CHECK(with < without * 1.05);
  }
  // Values of one size, and what is not a whole block.
  for (const std::size_t count : {1, 255, 256, 300, 512})
    for (const float value : {0.0F, -3.0F})
      for (const float found : through(Codec::int8_rotated, std::vector<float>(count, value)))
        CHECK(std::abs(found - value) <= 0.1F);
}

void check_special_values() {
  // Extremes survive; zeros and the tiniest stay small.
  for (const Codec codec : {Codec::bf16, Codec::int8, Codec::int4, Codec::int8_rotated, Codec::int4_rotated}) {
    CHECK(through(codec, {0, 0, 0}) == std::vector<float>({0, 0, 0}));
    CHECK(std::abs(through(codec, {1e-42F})[0]) <= 2e-42F);
    CHECK(std::isfinite(through(codec, {3e38F})[0]));
    CHECK(std::abs(through(codec, {-8})[0] + 8) < 1e-6F);
  }
  // What is not finite never becomes finite.
  const auto half = through(Codec::bf16, {1, infinity, -infinity, nan});
  CHECK(half[0] == 1 && half[1] == infinity && half[2] == -infinity && std::isnan(half[3]));
  for (const float bad : {infinity, -infinity, nan}) {
    std::vector<float> values(300, 1);
    values[7] = bad;
    for (const Codec codec : {Codec::int8, Codec::int4, Codec::int8_rotated, Codec::int4_rotated}) {
      const auto found = through(codec, values);
      for (std::size_t i = 0; i < code_block; ++i) CHECK(std::isnan(found[i]));
      for (std::size_t i = code_block; i < values.size(); ++i) CHECK(std::abs(found[i] - 1) < 1e-6F);
    }
  }
}

void check_error_feedback() {
  // The sum over steps stays within one step's error, where without feedback errors add up.
  const auto values = random_values(1000, 3);
  for (const Codec codec : {Codec::bf16, Codec::int8}) {
    constexpr int steps = 200;
    std::vector<float> residual(values.size());
    double with = 0;
    double without = 0;
    std::vector<double> sum(values.size());
    std::vector<double> plain(values.size());
    for (int step = 0; step < steps; ++step) {
      const auto fed = through(codec, values, residual.data());
      const auto bare = through(codec, values);
      for (std::size_t i = 0; i < values.size(); ++i) sum[i] += fed[i];
      for (std::size_t i = 0; i < values.size(); ++i) plain[i] += bare[i];
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      with = std::max(with, std::abs(sum[i] - double{values[i]} * steps));
      without = std::max(without, std::abs(plain[i] - double{values[i]} * steps));
      CHECK(std::abs(sum[i] - double{values[i]} * steps) <= largest_of_block(values, i) / 127 * 0.6);
    }
    std::printf("sum of %d steps, largest error: %g with error feedback, %g without\n", steps, with, without);
    CHECK(with * 50 < without);
  }
  // An infinity does not stay in the residual.
  std::vector<float> residual(2);
  through(Codec::bf16, {infinity, nan}, residual.data());
  CHECK(residual == std::vector<float>({0, 0}));
}

}  // namespace

int main() {
  check_bounds();
  check_rotation();
  check_special_values();
  check_error_feedback();
  return holmes::test::result("codec");
}
