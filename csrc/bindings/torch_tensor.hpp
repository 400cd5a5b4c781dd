// torch tensors as their Python attributes tell them, without torch's headers.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "holmes/core/types.hpp"

namespace holmes {

// Whether `object` is a torch tensor (also one of a subclass). False before torch is imported.
bool is_torch_tensor(const pybind11::handle& object);

// Reads a tensor; its class is not asked (`__torch_function__` is off meanwhile).
class [[gnu::visibility("hidden")]] TorchTensor {  // as pybind11's own classes are
public:
  // `tensor`: is_torch_tensor, outlives this. `what` names it in errors.
  TorchTensor(const pybind11::handle& tensor, const char* what);
  ~TorchTensor();
  TorchTensor(const TorchTensor&) = delete;
  TorchTensor& operator=(const TorchTensor&) = delete;

  bool is_cpu() const;
  // "cuda:0"
  std::string device() const;
  // The number of its GPU; absent: it is not on one.
  std::optional<int> gpu() const;
  // Its elements, without owner. Throws UsageError naming the fix where they are not, as they lie in memory, what the
  // tensor stands for: other layouts than strided ones, unsupported dtypes, gaps or another order between elements, the
  // negative bit, nested tensors, tensors without memory (freed storages, subclasses that wrap other tensors).
  Buffer memory() const;
  // What holds that memory, whatever becomes of the tensor (`tensor.data = other`).
  pybind11::object storage() const;

private:
  [[noreturn]] void refuse(const std::string& reason) const;
  void check_form() const;
  DType dtype() const;
  void* checked_data(std::size_t bytes, std::size_t element_bytes) const;

  const pybind11::handle tensor_;
  const char* const what_;
  pybind11::object torch_function_off_;  // null: the class cannot have one
};

}  // namespace holmes
