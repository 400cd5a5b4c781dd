// NCCL's binary interface, as far as Holmes uses it: written down here so that no nccl.h is needed to build and one
// binary serves every NCCL from 2.18 on. Values and layouts are those of NCCL's public header, which keeps them stable.
#pragma once

#include <climits>
#include <cstddef>
#include <optional>
#include <string>

#include "holmes/core/types.hpp"

namespace holmes::nccl {

// Codes of later versions are errors too: only these are told apart.
using Result = int;
inline constexpr Result success = 0;
inline constexpr Result unhandled_cuda_error = 1;
inline constexpr Result invalid_argument = 4;
inline constexpr Result in_progress = 7;

using Comm = struct CommOpaque*;  // ncclComm_t
using Stream = void*;             // cudaStream_t, which is the driver's CUstream

struct UniqueId {
  char internal[128];
};

// ncclScalarResidence_t
inline constexpr int scalar_on_host = 1;

inline constexpr int oldest_version = 21800;
inline constexpr int newest_known_version = 23203;  // the version whose layout `Config` is

inline constexpr int undefined_int = INT_MIN;  // "NCCL's default"

// ncclConfig_t of 2.32. Older versions are a prefix of it, so `size` says how much a library may read.
struct Config {
  std::size_t size = 0;
  unsigned int magic = 0xcafebeef;
  unsigned int version = 0;
  int blocking = undefined_int;
  int cga_cluster_size = undefined_int;
  int min_ctas = undefined_int;
  int max_ctas = undefined_int;
  const char* net_name = nullptr;
  int split_share = undefined_int;
  int traffic_class = undefined_int;  // until 2.25 padding
  const char* comm_name = nullptr;
  int collnet_enable = undefined_int;
  int cta_policy = undefined_int;
  int shrink_share = undefined_int;
  int nvls_ctas = undefined_int;
  int channels_per_net_peer = undefined_int;
  int nvlink_centric_sched = undefined_int;
  int graph_usage_mode = undefined_int;
  int rma_contexts = undefined_int;
  int max_p2p_peers = undefined_int;
  int graph_stream_ordering = undefined_int;
  int launch_order_implicit = undefined_int;
  int rma_signals = undefined_int;
  int rma_eager_init = undefined_int;
  int host_cft_mode = undefined_int;
  int nvls_host_mode = undefined_int;
};
static_assert(sizeof(Config) == 120 && offsetof(Config, net_name) == 32 && offsetof(Config, comm_name) == 48);

// Size of ncclConfig_t in the header of `version` (21803 is 2.18.3).
std::size_t config_bytes(int version);
// Every field at its default, with exactly the size and version that a program compiled against `version` would say.
Config make_config(int version);

// 21803 -> "2.18.3".
std::string version_text(int version);

// ncclDataType_t. Absent where NCCL has no such type (int16); bool travels as uint8.
std::optional<int> data_type_of(DType dtype);
// ncclRedOp_t. Throws UsageError where NCCL cannot reduce so: bitwise operations of integers, any of int16, xor of
// bool.
int reduction_of(ReduceOp op, DType dtype);

// Scalar: a number as an element of a floating point type.
class Scalar {
public:
  // Rounded to nearest even. `dtype`: floating point.
  Scalar(double value, DType dtype);
  void* data() { return bytes_; }

private:
  alignas(8) std::byte bytes_[8] = {};
};

}  // namespace holmes::nccl
