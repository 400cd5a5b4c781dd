#include "holmes/core/types.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>

#include "holmes/core/error.hpp"

namespace holmes {
namespace {

constexpr std::array<std::string_view, dtype_count> dtype_names = {"float64", "float32", "float16", "bfloat16", "int8",
                                                                   "int16",   "int32",   "int64",   "uint8",    "bool"};
constexpr std::array<std::string_view, reduce_op_count> reduce_op_names = {"sum",     "avg",  "min", "max",
                                                                           "product", "band", "bor", "bxor"};
constexpr std::array<std::string_view, op_code_count> op_names = {
    "",        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather",
    "scatter", "all_to_all", "barrier",        "split",      "send",      "recv",   "batch"};

template <typename Enum, std::size_t n>
Enum from_name(std::string_view text, const std::array<std::string_view, n>& names, const char* what) {
  std::string allowed;
  for (std::size_t i = 0; i < n; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
    allowed += (i ? ", " : "") + std::string(names[i]);
  }
  throw UsageError(std::string(what) + " '" + std::string(text) + "' is not supported; use one of: " + allowed);
}

}  // namespace

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::string_view name(DType dtype) { return dtype_names[static_cast<std::size_t>(dtype)]; }
std::string_view name(ReduceOp op) { return reduce_op_names[static_cast<std::size_t>(op)]; }
std::string_view name(OpCode op) {
  const auto index = static_cast<std::size_t>(op);
  return index < op_names.size() ? op_names[index] : "unknown operation";
}

DType dtype_from_name(std::string_view text) { return from_name<DType>(text, dtype_names, "dtype"); }
ReduceOp reduce_op_from_name(std::string_view text) { return from_name<ReduceOp>(text, reduce_op_names, "reduction"); }
std::optional<OpCode> op_code_from_name(std::string_view text) {
  const auto found = std::find(op_names.begin() + 1, op_names.end(), text);
  if (found == op_names.end()) return std::nullopt;
  return static_cast<OpCode>(found - op_names.begin());
}

void check_reduction(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::band || op == ReduceOp::bor || op == ReduceOp::bxor;
  if (op == ReduceOp::avg && !is_floating(dtype))
    throw UsageError("reduction 'avg' is not defined for " + std::string(name(dtype)) +
                     "; it takes floating point: use 'sum' and divide, or convert the buffer");
  if (bitwise && is_floating(dtype))
    throw UsageError("reduction '" + std::string(name(op)) + "' is not defined for " + std::string(name(dtype)) +
                     "; it takes integers and bool");
}

}  // namespace holmes
