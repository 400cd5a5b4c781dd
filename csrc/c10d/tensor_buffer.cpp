#include "tensor_buffer.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <optional>
#include <string>

#include "device_stream.hpp"
#include "holmes/core/error.hpp"

namespace holmes::torch_backend {
namespace {

std::optional<DType> known_dtype(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kChar:
      return DType::int8;
    case at::kShort:
      return DType::int16;
    case at::kInt:
      return DType::int32;
    case at::kLong:
      return DType::int64;
    case at::kByte:
      return DType::uint8;
    case at::kBool:
      return DType::boolean;
    default:
      return std::nullopt;
  }
}

std::string shape_of(const at::Tensor& tensor) { return c10::str(tensor.scalar_type(), " ", tensor.sizes()); }

// Kinds of dense tensors whose memory is not, or not all of, what they stand for.
void check_kind(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.has_symbolic_sizes_strides())
    throw UsageError("the tensor has symbolic sizes (it is of a trace); pass a tensor with data");
  if (tensor.is_nested())
    throw UsageError("a nested tensor cannot be communicated; pass tensor.values() or the tensors in it");
  if (tensor.is_quantized())
    throw UsageError("a quantized tensor cannot be communicated: its scales would stay behind; pass int_repr() or " +
                     std::string("dequantize()"));
  const bool is_wrapper = impl.key_set().has(c10::DispatchKey::Python);
  if (!impl.has_storage() || (is_wrapper && tensor.storage().data() == nullptr))
    throw UsageError("the tensor has no memory of its own; pass the plain tensor that it stands for (a DTensor's " +
                     std::string("to_local(), the tensor inside a wrapper; a FakeTensor has none)"));
}

std::size_t needed_storage_bytes(const at::Tensor& tensor) {
  const auto offset = static_cast<std::size_t>(tensor.storage_offset());
  if (tensor.is_contiguous()) return (offset + static_cast<std::size_t>(tensor.numel())) * tensor.itemsize();
  return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), offset);
}

// The storage must hold the tensor: it may have been freed or shrunk, or be a subclass's that has none.
void check_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const c10::Storage& storage = tensor.storage();
  const std::size_t needed_bytes = needed_storage_bytes(tensor);
  if (storage.nbytes() < needed_bytes)
    throw UsageError("the storage of the tensor (" + shape_of(tensor) + ") holds " + std::to_string(storage.nbytes()) +
                     " of the " + std::to_string(needed_bytes) +
                     " bytes that it needs (it was freed or shrunk); pass a tensor that holds its values");
  if (storage.data() == nullptr)
    throw UsageError("the tensor (" + shape_of(tensor) +
                     ") has no memory of its own; pass the plain tensor that it stands for");
}

// What a result is written into.
void check_writable(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  throw UsageError("a result cannot be written into a tensor whose elements share memory (" + shape_of(tensor) +
                   ", strides " + c10::str(tensor.strides()) + "); pass tensor.contiguous()");
}

void check_tensor(const at::Tensor& tensor, Payload payload, c10::Device device) {
  if (!tensor.defined()) throw UsageError("the tensor is undefined; pass a tensor with data");
  if (tensor.layout() != at::kStrided)
    throw UsageError("a tensor of layout " + c10::str(tensor.layout()) +
                     " cannot be communicated; Holmes takes dense tensors: call to_dense() first");
  if (tensor.device() != device)
    throw UsageError("the tensor is on device " + tensor.device().str() + ", another of the call on " + device.str() +
                     "; use tensors of one device");
  check_kind(tensor);
  const bool is_sum_of_parts = payload == Payload::sum && tensor.is_complex();
  if (payload != Payload::move && !is_sum_of_parts && !known_dtype(tensor.scalar_type()))
    throw UsageError("dtype " + std::string(c10::toString(tensor.scalar_type())) +
                     " cannot be reduced; use float64, float32, float16, bfloat16, int8 to int64, uint8 or bool" +
                     (tensor.is_complex() ? ", or for a sum torch.view_as_real(tensor)" : ""));
  check_memory(tensor);
}

// Elements of a dtype that travels as bytes are counted in bytes.
std::size_t count_of(const at::Tensor& tensor) {
  return known_dtype(tensor.scalar_type()) ? static_cast<std::size_t>(tensor.numel()) : tensor.nbytes();
}

}  // namespace

bool is_reducible(at::ScalarType type) { return known_dtype(type).has_value(); }

Buffer contiguous_buffer(const at::Tensor& tensor) {
  Buffer buffer;
  buffer.data = tensor.data_ptr();
  if (const auto dtype = known_dtype(tensor.scalar_type())) {
    buffer.dtype = *dtype;
    buffer.count = static_cast<std::size_t>(tensor.numel());
  } else {
    buffer.count = tensor.nbytes();
  }
  buffer.owner = std::make_shared<c10::Storage>(tensor.storage());
  return buffer;
}

// Without what torch has no isnan for.
void check_nan(const at::Tensor& tensor) {
  const at::ScalarType type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) return;
  const at::NoGradGuard no_grad;
  const at::Tensor has_nan = at::isnan(tensor).any();
  const std::string what = "a tensor (" + shape_of(tensor) +
                           ") has a NaN, which TORCH_NCCL_NAN_CHECK=1 forbids; look for the operation that made it";
  if (!tensor.is_cpu()) return at::_assert_async(has_nan.logical_not(), what);
  if (has_nan.item<bool>()) throw UsageError(what);
}

Operands::Operands(c10::Device device) : device_(device) {
  if (device.is_cpu()) return;
  if (!device.is_cuda())
    throw UsageError(
        "the tensor is on device " + device.str() +
        "; the holmes backend takes CPU and CUDA tensors: call .cpu() or give that device its own backend " +
        "(init_process_group(\"cpu:holmes," + c10::DeviceTypeName(device.type(), true) + ":...\"))");
  stream_ = current_stream(device);
}

Buffer Operands::buffer_of(const at::Tensor& tensor) const {
  Buffer buffer = contiguous_buffer(tensor);
  if (!device_.is_cpu()) {
    buffer.device = device_.index();
    buffer.stream = stream_;
  }
  return buffer;
}

Buffer Operands::stage(const at::Tensor& tensor, Payload payload, bool is_read, bool is_written) {
  check_tensor(tensor, payload, device_);
  if (is_written) {
    check_writable(tensor);
    written.push_back(tensor);
  }
  const at::NoGradGuard no_grad;
  at::Tensor plain = tensor;
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    plain = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
    if (is_read) plain.copy_(tensor);
    if (is_written) copies.push_back({tensor, plain});
  }
  if (payload == Payload::sum && plain.is_complex()) plain = at::view_as_real(plain);
  if (refuses_nan_ && is_read) check_nan(plain);
  return buffer_of(plain);
}

Buffer Operands::input(const at::Tensor& tensor, Payload payload) { return stage(tensor, payload, true, false); }
Buffer Operands::output(const at::Tensor& tensor, Payload payload) { return stage(tensor, payload, false, true); }
Buffer Operands::in_place(const at::Tensor& tensor, Payload payload) { return stage(tensor, payload, true, true); }

std::vector<Buffer> Operands::in_place(at::TensorList tensors, Payload payload) {
  return stage_all(tensors, payload, true, true);
}
std::vector<Buffer> Operands::inputs(at::TensorList tensors, Payload payload) {
  return stage_all(tensors, payload, true, false);
}
std::vector<Buffer> Operands::outputs(at::TensorList tensors, Payload payload) {
  return stage_all(tensors, payload, false, true);
}

std::vector<Buffer> Operands::stage_all(at::TensorList tensors, Payload payload, bool is_read, bool is_written) {
  std::vector<Buffer> buffers;
  for (const auto& tensor : tensors) buffers.push_back(stage(tensor, payload, is_read, is_written));
  return buffers;
}

std::vector<Buffer> pieces(const Buffer& whole, std::span<const std::size_t> counts) {
  std::vector<Buffer> parts;
  std::size_t offset_bytes = 0;
  for (const std::size_t count : counts) {
    Buffer part = whole;
    part.data = whole.begin() + offset_bytes;
    part.count = count;
    offset_bytes += part.bytes();
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<Buffer> equal_pieces(const Buffer& whole, int n, const char* what) {
  const auto parts = static_cast<std::size_t>(n);
  if (whole.count % parts != 0)
    throw UsageError(std::string(what) + " has " + std::to_string(whole.count) + " elements, which " +
                     std::to_string(n) + " ranks cannot share evenly; pad it or use the list form");
  return pieces(whole, std::vector<std::size_t>(parts, whole.count / parts));
}

std::vector<std::size_t> split_counts(const at::Tensor& tensor, std::span<const std::int64_t> splits, int n,
                                      const char* what) {
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const std::size_t row_elements = rows == 0 ? 0 : count_of(tensor) / static_cast<std::size_t>(rows);
  std::vector<std::int64_t> row_splits(splits.begin(), splits.end());
  if (row_splits.empty()) {
    if (rows % n != 0)
      throw UsageError(std::string(what) + " has " + std::to_string(rows) + " rows, which " + std::to_string(n) +
                       " ranks cannot share evenly; give split sizes");
    row_splits.assign(static_cast<std::size_t>(n), rows / n);
  }
  std::int64_t sum = 0;
  std::vector<std::size_t> counts;
  for (const std::int64_t split : row_splits) {
    if (split < 0)
      throw UsageError(std::string(what) + " has the negative split size " + std::to_string(split) + "; use 0 or more");
    if (split > rows - std::min(sum, rows))
      throw UsageError(std::string(what) + " has " + std::to_string(rows) + " rows; split size " +
                       std::to_string(split) + " after " + std::to_string(sum) +
                       " rows is more; give split sizes that sum to the number of rows");
    sum += split;
    counts.push_back(static_cast<std::size_t>(split) * row_elements);
  }
  if (static_cast<int>(row_splits.size()) != n || sum != rows)
    throw UsageError(std::string(what) + " has " + std::to_string(rows) + " rows and " +
                     std::to_string(row_splits.size()) + " split sizes that sum to " + std::to_string(sum) + "; give " +
                     std::to_string(n) + " sizes (one per rank) that sum to the number of rows");
  return counts;
}

}  // namespace holmes::torch_backend
