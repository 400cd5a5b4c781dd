// The kernels behind reduce.hpp and copy.hpp, once per instruction set. Internal: use those headers.
#pragma once

#include <cstddef>
#include <span>

#include "holmes/core/types.hpp"

namespace holmes {

// The arguments of reduce(), as every kernel takes them.
struct Reduction {
  void* destination;
  const void* const* sources;
  int source_count;
  std::size_t count;
  int source_total;
  bool non_temporal_destination;
};

using ReduceKernel = void (*)(const Reduction&);
using CopyKernel = void (*)(void* destination, const void* source, std::size_t bytes);

struct KernelSet {
  const char* name;                                   // of the instruction set
  ReduceKernel reduce[dtype_count][reduce_op_count];  // null where check_reduction refuses
  CopyKernel copy;
  CopyKernel copy_non_temporal;
};

// The kernel sets this CPU can run, best first; the last is the baseline. All give bit-identical results
// (except for the sign and payload of a NaN).
std::span<const KernelSet* const> supported_kernels();

}  // namespace holmes
