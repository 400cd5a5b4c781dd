#include "holmes/nccl/abi.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "holmes/core/error.hpp"

namespace holmes::nccl {
namespace {

// First version with so many bytes.
constexpr std::array<std::pair<int, std::size_t>, 7> config_sizes = {
    {{21800, 48}, {22700, 72}, {22800, 80}, {22900, 88}, {23003, 96}, {23102, 112}, {23203, 120}}};

}  // namespace

std::size_t config_bytes(int version) {
  std::size_t bytes = config_sizes.front().second;
  for (const auto& [first, size] : config_sizes)
    if (version >= first) bytes = size;
  return bytes;
}

Config make_config(int version) {
  Config config;
  config.size = config_bytes(version);
  config.version = static_cast<unsigned>(std::min(version, newest_known_version));
  return config;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::optional<int> data_type_of(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return 0;
    case DType::uint8:
    case DType::boolean:
      return 1;
    case DType::int32:
      return 2;
    case DType::int64:
      return 4;
    case DType::float16:
      return 6;
    case DType::float32:
      return 7;
    case DType::float64:
      return 8;
    case DType::bfloat16:
      return 9;
    case DType::int16:
      return std::nullopt;
  }
  return std::nullopt;
}

int reduction_of(ReduceOp op, DType dtype) {
  constexpr int sum = 0, product = 1, max = 2, min = 3, avg = 4;
  check_reduction(dtype, op);
  const auto refuse = [&](const std::string& fix) {
    throw UsageError("NCCL has no reduction '" + std::string(name(op)) + "' of " + std::string(name(dtype)) + "; " +
                     fix);
  };
  if (!data_type_of(dtype)) refuse("convert the buffer to int32");
  if (dtype == DType::boolean) {
    // On 0 and 1, max is "or" and min is "and": sums would not stay 0 or 1.
    if (op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bor) return max;
    if (op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::band) return min;
    refuse("convert to int32, sum, and take the lowest bit");
  }
  switch (op) {
    case ReduceOp::sum:
      return sum;
    case ReduceOp::product:
      return product;
    case ReduceOp::max:
      return max;
    case ReduceOp::min:
      return min;
    case ReduceOp::avg:
      return avg;
    default:
      refuse("gather the buffers and combine them, or use a communicator for host memory");
  }
  return sum;
}

}  // namespace holmes::nccl
