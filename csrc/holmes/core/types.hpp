// Data types, reduction operations and buffers: what an operation moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace holmes {

// Of the system's memory.
std::size_t page_bytes();

// Element types. Values are part of the wire protocol.
enum class DType : std::uint8_t {
  float64 = 0,
  float32 = 1,
  float16 = 2,
  bfloat16 = 3,
  int8 = 4,
  int16 = 5,
  int32 = 6,
  int64 = 7,
  uint8 = 8,
  boolean = 9,  // one byte, 0 or 1
};
inline constexpr int dtype_count = 10;

// Reductions. `avg` divides the sum by the number of ranks (floating point only). Bitwise operations take
// integers and bool; on bool, sum and max are "or", product and min are "and". Values are part of the protocol.
enum class ReduceOp : std::uint8_t {
  sum = 0,
  avg = 1,
  min = 2,
  max = 3,
  product = 4,
  band = 5,
  bor = 6,
  bxor = 7,
};
inline constexpr int reduce_op_count = 8;

// What a communicator does. Values up to `split` are collectives and part of the wire protocol.
enum class OpCode : std::uint8_t {
  all_reduce = 1,
  reduce_scatter = 2,
  all_gather = 3,
  broadcast = 4,
  reduce = 5,
  gather = 6,
  scatter = 7,
  all_to_all = 8,
  barrier = 9,
  split = 10,
  send = 11,
  recv = 12,
  batch = 13,  // of NCCL, where a group of sends and receives is one operation
};
inline constexpr std::size_t op_code_count = 14;

constexpr std::size_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
    case DType::int16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::float64 || dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

std::string_view name(DType dtype);
std::string_view name(ReduceOp op);
std::string_view name(OpCode op);  // any value: a peer may have sent it
// Both throw UsageError naming the value and the allowed ones.
DType dtype_from_name(std::string_view text);
ReduceOp reduce_op_from_name(std::string_view text);
// Absent: there is none of this name.
std::optional<OpCode> op_code_from_name(std::string_view text);
// Throws UsageError where `op` is not defined for `dtype` (avg of integers, bitwise of floats).
void check_reduction(DType dtype, ReduceOp op);

// Memory of `count` contiguous elements. `owner` keeps it alive as long as a Work needs it.
struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;
  DType dtype = DType::uint8;
  std::shared_ptr<void> owner{};
  std::optional<int> device{};  // number of the GPU whose memory it is; absent: host memory
  void* stream = nullptr;       // of a GPU's memory: the CUstream on which it is ready; null: the default stream

  std::size_t bytes() const { return count * size_bytes(dtype); }
  std::byte* begin() const { return static_cast<std::byte*>(data); }
};

inline Buffer no_data(DType dtype) { return {nullptr, 0, dtype, nullptr}; }
// For each of so many ranks.
inline std::vector<Buffer> no_data(DType dtype, int ranks) {
  return std::vector(static_cast<std::size_t>(ranks), no_data(dtype));
}

inline std::size_t total_bytes(const std::vector<Buffer>& buffers) {
  std::size_t total = 0;
  for (const Buffer& buffer : buffers) total += buffer.bytes();
  return total;
}

}  // namespace holmes
