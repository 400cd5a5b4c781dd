// Env: every environment variable the engine reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "holmes/core/log.hpp"

namespace holmes {

// How a further NCCL image is made: without the file's GPU code, which is mapped from the original; or as a whole copy.
enum class NcclImageForm { sparse, copy };
// Cross memory attach: when to read larger pieces out of the memory of another rank of the host.
enum class CmaUse { never, measured, always };

// One field per variable. `Env::read()` looks when it is called (a communicator, when it is made).
struct Env {
  // HOLMES_LOG = error | warn | info | debug. What is written to stderr. Default warn. Read once per process.
  LogLevel log = LogLevel::warn;

  // HOLMES_SECRET = text. The job's secret, the same on all ranks. Default: HOLMES_SECRET_FILE.
  std::optional<std::string> secret;
  // HOLMES_SECRET_FILE = path. A file whose content (less a final newline) is the secret. Default: rank 0 makes one and
  // shares it through the Store.
  std::optional<std::string> secret_file;

  // HOLMES_TLS = off | clusters | all. Which TCP connections are encrypted: none, those between clusters, every one.
  // Default off.
  std::string tls = "off";
  // HOLMES_SSL_LIBRARY = path. The OpenSSL (its libssl) to use for TLS. Default: the system's.
  std::optional<std::string> ssl_library;

  // HOLMES_HOSTNAME = text. Name of this host in messages. Default: what gethostname says.
  std::optional<std::string> hostname;

  // HOLMES_PORT_RANGE = first-last (1 to 65535). Ports of listening sockets. Default: the kernel chooses.
  std::optional<std::pair<std::uint16_t, std::uint16_t>> port_range;

  // HOLMES_CONNECT_TIMEOUT_S = seconds (> 0, fractions allowed). Deadline of a communicator's set-up, in place of the
  // one its options say. Default: the options.
  std::optional<std::chrono::nanoseconds> connect_timeout;

  // HOLMES_SHM = 0 | 1. 0: ranks of one host use TCP too. Default 1.
  bool shm = true;
  // HOLMES_CMA = auto | always | 0. Copies between ranks of one host out of the sender's memory (process_vm_readv) in
  // place of shared memory: where they are measured to cost less, for all larger pieces, never. Default auto.
  CmaUse cma = CmaUse::measured;

  // HOLMES_SPIN_US = microseconds (0 to 1000000). How long a waiting thread polls before it blocks. Default: measured
  // choice of the engine.
  std::optional<std::chrono::microseconds> spin;

  // HOLMES_IO_THREADS = number (1 to 64). Threads that move the bytes of asynchronous operations; communicators take
  // turns over them. With HOLMES_IO_CPUS=numa so many for each NUMA node with a NIC in use. Default 1.
  int io_threads = 1;

  // HOLMES_IO_CPUS = list | numa. Processors of these threads: "2,4-7", or those of the NUMA node of the communicator's
  // first NIC, where it has one. Default: the kernel chooses.
  std::vector<int> io_cpus;
  bool io_cpus_near_nic = false;

  // HOLMES_RAIL_TIMEOUT_S = seconds (> 0, fractions allowed). A rail on which the peer acknowledges nothing for so
  // long, though the system repeats it, is lost; the others go on. Default 2.
  std::chrono::nanoseconds rail_timeout = std::chrono::seconds(2);

  // HOLMES_FLIGHT_RECORDER = number (0 to 1000000). Operations that each communicator remembers for diagnosis. 0: none,
  // and `holmes debug` cannot ask this process. Default 256.
  std::size_t flight_recorder_operations = 256;
  // HOLMES_FLIGHT_RECORDER_DIR = folder. A process whose communicator fails writes its flight record there, and all
  // others with the same folder do too. Default: nothing is written.
  std::optional<std::string> flight_recorder_folder;
  // HOLMES_FLIGHT_RECORDER_SIGNAL = USR1 | USR2 | HUP | QUIT. On this signal the record is written there. Needs the
  // folder. Default: none.
  int flight_recorder_signal = 0;

  // HOLMES_TCP_CONGESTION = name. Congestion control of every data socket, one of tcp_allowed_congestion_control.
  // Default: the system's; reno between ranks of one host.
  std::optional<std::string> tcp_congestion;

  // HOLMES_HIERARCHICAL_MIN_BYTES = bytes | never. From how many bytes on an operation over clusters runs
  // hierarchically; equal on all ranks. UINT64_MAX stands for never. Default: measured when the communicator is made.
  std::optional<std::uint64_t> hierarchical_min_bytes;

  // HOLMES_PINNED_RING_BYTES = bytes (65536 to 1 GiB). Page-locked memory through which messages of a GPU's memory
  // travel, for each peer, direction and GPU that has any. Default 4 MiB.
  std::uint64_t pinned_ring_bytes = 4 * 1024 * 1024;

  // HOLMES_NCCL_LIBRARY = path. The NCCL library to use. Default: the one that is already loaded, else the Python
  // package's, else the system's.
  std::optional<std::string> nccl_library;

  // HOLMES_CUDA_LIBRARY = path. The CUDA driver to use. Default: libcuda.so.1.
  std::optional<std::string> cuda_library;

  // HOLMES_NCCL_IMAGE = sparse | copy. Form of the further NCCL images. Default sparse; where that fails, copy.
  NcclImageForm nccl_image = NcclImageForm::sparse;
  // HOLMES_NCCL_IMAGE_FOLDER = path. Folder for copies. Default: TMPDIR, /var/tmp, /tmp, /dev/shm, whatever works
  // first.
  std::optional<std::string> nccl_image_folder;

  // Throws UsageError naming variable, value, rule and fix.
  static Env read();
};

// What `Env` documents, as data: for help texts and for the test that every variable is documented.
struct EnvVariable {
  std::string name;
  std::string values;
  std::string default_value;
  std::string meaning;
};
const std::vector<EnvVariable>& env_variables();

// HOLMES_HOSTNAME, else the system's host name.
std::string host_name();

}  // namespace holmes
