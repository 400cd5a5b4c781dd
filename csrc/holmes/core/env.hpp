// Env: every environment variable the engine reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "holmes/core/log.hpp"

namespace holmes {

// How a further NCCL image is made: without the file's GPU code, which is mapped from the original; or as a whole copy.
enum class NcclImageForm { sparse, copy };
// Whether HCAs read and write a GPU's memory where it is, and who makes it known to them.
enum class GpuDirect { off, dmabuf, peermem };
// Cross memory attach: when to read larger pieces out of the memory of another rank of the host.
enum class CmaUse { never, measured, always };

// What the engine's variables say (`env_variables`), one field each. `read()` looks when it is called (a communicator,
// when it is made).
struct Env {
  LogLevel log = LogLevel::warn;
  std::optional<std::string> hostname;

  std::optional<std::string> secret;
  std::optional<std::string> secret_file;
  std::string tls = "off";
  std::optional<std::string> ssl_library;

  std::optional<std::pair<std::uint16_t, std::uint16_t>> port_range;
  std::optional<std::chrono::nanoseconds> connect_timeout;
  std::chrono::nanoseconds rail_timeout = std::chrono::seconds(2);
  std::optional<std::string> tcp_congestion;
  std::optional<int> far_streams;
  std::uint64_t unexpected_bytes = std::uint64_t{256} << 20;
  bool integrity = false;
  int integrity_digest_every = 0;
  bool local_completion = false;
  bool shm = true;
  CmaUse cma = CmaUse::measured;
  std::optional<std::uint64_t> hierarchical_min_bytes;  // UINT64_MAX: never
  int wide_min_ranks = 257;

  std::optional<std::string> verbs_library;
  std::optional<std::string> transport;
  std::optional<int> rdma_gid_index;
  std::optional<int> rdma_mtu;  // bytes
  int rdma_pkey_index = 0;
  int rdma_service_level = 0;
  int rdma_traffic_class = 0;
  int rdma_timeout = 18;  // 4.096 us times 2 to the power of it
  int rdma_retries = 7;
  std::size_t rdma_direct_bytes = 1024 * 1024;
  GpuDirect rdma_gpudirect = GpuDirect::off;
  bool rdma_keep_registered = true;

  std::optional<std::chrono::microseconds> spin;
  int io_threads = 1;
  std::vector<int> io_cpus;
  bool io_cpus_near_nic = false;

  std::size_t flight_recorder_operations = 256;
  std::optional<std::string> flight_recorder_folder;
  int flight_recorder_signal = 0;

  std::uint64_t pinned_ring_bytes = 4 * 1024 * 1024;
  std::optional<std::string> cuda_library;
  std::optional<std::string> nccl_library;
  NcclImageForm nccl_image = NcclImageForm::sparse;
  std::optional<std::string> nccl_image_folder;

  // Throws UsageError naming variable, value, rule and fix. The first call warns of variables whose names are nearly
  // those of Holmes.
  static Env read();
};

// One environment variable of Holmes, as Markdown.
struct EnvVariable {
  std::string name;
  std::string values;
  std::string default_value;
  std::string meaning;
};

// All that Holmes reads, in the engine or in Python: the one place where they are described.
std::vector<EnvVariable> env_variables();
// The variable whose name is nearly this one, which is none: at most two letters differ, or one begins with the other.
std::optional<std::string> variable_meant_by(std::string_view name);

// HOLMES_HOSTNAME, else the system's host name.
std::string host_name();

}  // namespace holmes
