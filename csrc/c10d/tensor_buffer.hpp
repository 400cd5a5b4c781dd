// Tensors as the communicator sees them: contiguous memory of one device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <span>
#include <vector>

#include "holmes/core/types.hpp"

namespace holmes::torch_backend {

// What an operation does with the elements. `move` takes any dtype (those Holmes does not know travel as bytes), `sum`
// complex numbers too: their sum is that of their parts.
enum class Payload { move, reduce, sum };

// A result that has to be copied into a tensor the communicator could not write to.
struct CopyBack {
  at::Tensor target;
  at::Tensor source;
};

// The tensors of one operation. A tensor that is not contiguous (or conjugated) goes through a contiguous copy, as with
// Gloo; results are copied back when the work is done. Every method throws UsageError for a tensor that is sparse,
// nested or quantized, on another device than the first, of a dtype the operation is not defined for, without memory (a
// freed storage, a subclass that wraps others), or whose elements share memory where a result is written.
class Operands {
public:
  // Of tensors on `device`; a GPU's are ready on its current stream.
  explicit Operands(c10::Device device);

  Buffer input(const at::Tensor& tensor, Payload payload = Payload::move);
  Buffer output(const at::Tensor& tensor, Payload payload = Payload::move);
  Buffer in_place(const at::Tensor& tensor, Payload payload = Payload::move);
  std::vector<Buffer> in_place(at::TensorList tensors, Payload payload = Payload::move);
  std::vector<Buffer> inputs(at::TensorList tensors, Payload payload = Payload::move);
  std::vector<Buffer> outputs(at::TensorList tensors, Payload payload = Payload::move);

  // From now on a tensor of floating point that is read and has a NaN is refused: of the host by UsageError, of a GPU
  // by an assertion on its current stream, which ends what the GPU does.
  void refuse_nan() { refuses_nan_ = true; }

  // What the operation writes (its result), and what is still to be copied after it.
  std::vector<at::Tensor> written;
  std::vector<CopyBack> copies;

private:
  Buffer buffer_of(const at::Tensor& tensor) const;
  Buffer stage(const at::Tensor& tensor, Payload payload, bool is_read, bool is_written);
  std::vector<Buffer> stage_all(at::TensorList tensors, Payload payload, bool is_read, bool is_written);

  c10::Device device_;
  void* stream_ = nullptr;
  bool refuses_nan_ = false;
};

// Whether Holmes can reduce elements of this dtype.
bool is_reducible(at::ScalarType type);
// The memory of a contiguous tensor; as bytes where Holmes does not know the dtype. Holds its storage.
Buffer contiguous_buffer(const at::Tensor& tensor);
// Consecutive pieces of `whole`, of `counts` elements each.
std::vector<Buffer> pieces(const Buffer& whole, std::span<const std::size_t> counts);
// `n` equal pieces; throws UsageError where `whole` cannot be split evenly.
std::vector<Buffer> equal_pieces(const Buffer& whole, int n, const char* what);
// The element counts of the rows that `splits` (empty: equal) gives to each of `n` ranks along dimension 0.
std::vector<std::size_t> split_counts(const at::Tensor& tensor, std::span<const std::int64_t> splits, int n,
                                      const char* what);

}  // namespace holmes::torch_backend
