#include "holmes/reduce/reduce.hpp"

#ifdef HOLMES_X86_KERNELS
#include <cpuid.h>
#endif

#include <array>

#include "holmes/reduce/kernels.hpp"

namespace holmes {

namespace baseline {
extern const KernelSet kernels;
}
#ifdef HOLMES_X86_KERNELS
namespace avx2 {
extern const KernelSet kernels;
}
namespace avx512 {
extern const KernelSet kernels;
}
#endif

namespace {

struct Supported {
  std::array<const KernelSet*, 3> sets{};
  std::size_t count = 0;

  Supported() {
#ifdef HOLMES_X86_KERNELS
    __builtin_cpu_init();
    // f16c by its bit: clang 14 does not know its name.
    unsigned a = 0, b = 0, features = 0, d = 0;
    const bool has_f16c = __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_F16C) != 0;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c;
    if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      sets[count++] = &avx512::kernels;
    if (has_avx2) sets[count++] = &avx2::kernels;
#endif
    sets[count++] = &baseline::kernels;
  }
};

}  // namespace

std::span<const KernelSet* const> supported_kernels() {
  static const Supported supported;
  return {supported.sets.data(), supported.count};
}

void reduce(void* destination, const void* const* sources, int source_count, std::size_t count, DType dtype,
            ReduceOp op, int source_total, bool non_temporal_destination) {
  static const KernelSet& best = *supported_kernels().front();
  best.reduce[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)](
      {destination, sources, source_count, count, source_total, non_temporal_destination});
}

}  // namespace holmes
