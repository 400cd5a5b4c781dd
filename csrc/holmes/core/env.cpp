#include "holmes/core/env.hpp"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>

#include "holmes/core/cpu_list.hpp"
#include "holmes/core/error.hpp"

namespace holmes {
namespace {

std::optional<std::string> text_of(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

[[noreturn]] void refuse(const std::string& variable, const std::string& value, const std::string& rule,
                         const std::string& fix) {
  throw UsageError(variable + "='" + value + "' is not allowed: it must be " + rule + "; " + fix + " or unset it");
}

template <class Number>
std::optional<Number> number_from(const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<std::chrono::nanoseconds> seconds_of(const char* variable, const std::string& example) {
  const auto text = text_of(variable);
  if (!text) return std::nullopt;
  const auto seconds = number_from<double>(*text);
  if (!seconds || !std::isfinite(*seconds) || *seconds <= 0 || *seconds > 1e6)
    refuse(variable, *text, "a number of seconds above 0 and at most 1000000", "say for example " + example);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(*seconds));
}

int signal_from(const std::string& text) {
  const std::string name = text.starts_with("SIG") ? text.substr(3) : text;
  if (name == "USR1") return SIGUSR1;
  if (name == "USR2") return SIGUSR2;
  if (name == "HUP") return SIGHUP;
  if (name == "QUIT") return SIGQUIT;
  refuse("HOLMES_FLIGHT_RECORDER_SIGNAL", text, "USR1, USR2, HUP or QUIT", "say for example USR1");
}

std::pair<std::uint16_t, std::uint16_t> port_range_from(const std::string& text) {
  const auto dash = text.find('-');
  if (dash != std::string::npos) {
    const auto first = number_from<std::uint16_t>(text.substr(0, dash));
    const auto last = number_from<std::uint16_t>(text.substr(dash + 1));
    if (first && last && *first > 0 && *first <= *last) return {*first, *last};
  }
  refuse("HOLMES_PORT_RANGE", text, "two ports from 1 to 65535, 'first-last'", "say for example 40000-40100");
}

}  // namespace

Env Env::read() {
  Env env;
  if (const auto text = text_of("HOLMES_LOG")) {
    const auto level = log_level_from_name(*text);
    if (!level) refuse("HOLMES_LOG", *text, "error, warn, info or debug", "say for example info");
    env.log = *level;
  }
  env.secret = text_of("HOLMES_SECRET");
  env.secret_file = text_of("HOLMES_SECRET_FILE");
  if (const auto text = text_of("HOLMES_TLS")) {
    if (*text != "off" && *text != "clusters" && *text != "all")
      refuse("HOLMES_TLS", *text, "off, clusters or all", "say clusters to encrypt what travels between clusters");
    env.tls = *text;
  }
  env.ssl_library = text_of("HOLMES_SSL_LIBRARY");
  env.hostname = text_of("HOLMES_HOSTNAME");
  if (const auto text = text_of("HOLMES_PORT_RANGE")) env.port_range = port_range_from(*text);
  if (const auto timeout = seconds_of("HOLMES_CONNECT_TIMEOUT_S", "60")) env.connect_timeout = *timeout;
  if (const auto timeout = seconds_of("HOLMES_RAIL_TIMEOUT_S", "2")) env.rail_timeout = *timeout;
  if (const auto text = text_of("HOLMES_SHM")) {
    if (*text != "0" && *text != "1") refuse("HOLMES_SHM", *text, "0 or 1", "say 0 to use TCP inside a host");
    env.shm = *text == "1";
  }
  if (const auto text = text_of("HOLMES_CMA")) {
    if (*text != "auto" && *text != "always" && *text != "0")
      refuse("HOLMES_CMA", *text, "auto, always or 0", "say 0 where a rank must not read another one's memory");
    env.cma = *text == "0" ? CmaUse::never : *text == "always" ? CmaUse::always : CmaUse::measured;
  }
  if (const auto text = text_of("HOLMES_SPIN_US")) {
    const auto microseconds = number_from<int>(*text);
    if (!microseconds || *microseconds < 0 || *microseconds > 1'000'000) {
      refuse("HOLMES_SPIN_US", *text, "a whole number of microseconds from 0 to 1000000", "say for example 50");
    }
    env.spin = std::chrono::microseconds(*microseconds);
  }
  if (const auto text = text_of("HOLMES_IO_THREADS")) {
    const auto threads = number_from<int>(*text);
    if (!threads || *threads < 1 || *threads > 64)
      refuse("HOLMES_IO_THREADS", *text, "a whole number from 1 to 64", "say for example 2");
    env.io_threads = *threads;
  }
  if (const auto text = text_of("HOLMES_IO_CPUS")) {
    const auto cpus = cpu_list_from(*text);
    env.io_cpus_near_nic = *text == "numa";
    if (!cpus && !env.io_cpus_near_nic)
      refuse("HOLMES_IO_CPUS", *text, "processors as '2,4-7', or numa", "say for example 0-3");
    env.io_cpus = cpus.value_or(std::vector<int>{});
  }
  if (const auto text = text_of("HOLMES_HIERARCHICAL_MIN_BYTES")) {
    env.hierarchical_min_bytes = *text == "never" ? UINT64_MAX : number_from<std::uint64_t>(*text);
    if (!env.hierarchical_min_bytes) {
      refuse("HOLMES_HIERARCHICAL_MIN_BYTES", *text, "a whole number of bytes, or never", "say for example 65536");
    }
  }
  if (const auto text = text_of("HOLMES_FLIGHT_RECORDER")) {
    const auto operations = number_from<int>(*text);
    if (!operations || *operations < 0 || *operations > 1'000'000)
      refuse("HOLMES_FLIGHT_RECORDER", *text, "a whole number of operations from 0 to 1000000", "say for example 256");
    env.flight_recorder_operations = static_cast<std::size_t>(*operations);
  }
  env.flight_recorder_folder = text_of("HOLMES_FLIGHT_RECORDER_DIR");
  if (const auto text = text_of("HOLMES_FLIGHT_RECORDER_SIGNAL")) {
    env.flight_recorder_signal = signal_from(*text);
    if (!env.flight_recorder_folder)
      throw UsageError("HOLMES_FLIGHT_RECORDER_SIGNAL='" + *text +
                       "' needs a folder for what is written then; set HOLMES_FLIGHT_RECORDER_DIR too, or unset it");
  }
  if (const auto text = text_of("HOLMES_PINNED_RING_BYTES")) {
    const auto bytes = number_from<std::uint64_t>(*text);
    if (!bytes || *bytes < 65536 || *bytes > (std::uint64_t{1} << 30))
      refuse("HOLMES_PINNED_RING_BYTES", *text, "a whole number of bytes from 65536 to 1073741824",
             "say for example 4194304");
    env.pinned_ring_bytes = *bytes;
  }
  env.tcp_congestion = text_of("HOLMES_TCP_CONGESTION");
  env.cuda_library = text_of("HOLMES_CUDA_LIBRARY");
  env.nccl_library = text_of("HOLMES_NCCL_LIBRARY");
  if (const auto text = text_of("HOLMES_NCCL_IMAGE")) {
    if (*text != "sparse" && *text != "copy")
      refuse("HOLMES_NCCL_IMAGE", *text, "sparse or copy", "say copy where sparse images make trouble");
    env.nccl_image = *text == "copy" ? NcclImageForm::copy : NcclImageForm::sparse;
  }
  env.nccl_image_folder = text_of("HOLMES_NCCL_IMAGE_FOLDER");
  return env;
}

const std::vector<EnvVariable>& env_variables() {
  static const std::vector<EnvVariable> variables = {
      {"HOLMES_LOG", "error, warn, info, debug", "warn", "What is written to stderr; read once per process."},
      {"HOLMES_SECRET", "text", "HOLMES_SECRET_FILE", "The job's secret, the same on all ranks."},
      {"HOLMES_SECRET_FILE", "path", "rank 0 makes a secret and shares it through the Store",
       "File whose content, less a final newline, is the job's secret."},
      {"HOLMES_TLS", "off, clusters, all", "off",
       "TCP connections that are encrypted: none, those between clusters, all."},
      {"HOLMES_SSL_LIBRARY", "path", "the system's libssl", "The OpenSSL to use for TLS."},
      {"HOLMES_HOSTNAME", "text", "gethostname", "Name of this host in messages."},
      {"HOLMES_PORT_RANGE", "first-last, 1 to 65535", "the kernel chooses", "Ports of listening sockets."},
      {"HOLMES_CONNECT_TIMEOUT_S", "seconds, above 0", "the communicator's options",
       "Deadline of a communicator's set-up, in place of the one its options say."},
      {"HOLMES_SHM", "0 or 1", "1", "0: ranks of one host use TCP too."},
      {"HOLMES_CMA", "auto, always, 0", "auto",
       "Ranks of one host read larger pieces out of each other's memory: where measured to be faster, always, never."},
      {"HOLMES_SPIN_US", "microseconds, 0 to 1000000", "the engine's choice",
       "How long a waiting thread polls before it blocks."},
      {"HOLMES_IO_THREADS", "1 to 64", "1",
       "Threads that move the bytes of asynchronous operations of all communicators."},
      {"HOLMES_IO_CPUS", "processors, 2,4-7, or numa", "the kernel chooses",
       "Processors of the I/O threads; numa: those of the NUMA node of the communicator's first NIC."},
      {"HOLMES_RAIL_TIMEOUT_S", "seconds, above 0", "2",
       "A rail on which the peer acknowledges nothing for so long is lost; the others go on."},
      {"HOLMES_FLIGHT_RECORDER", "operations, 0 to 1000000", "256",
       "Operations that each communicator remembers for diagnosis; 0: none, and holmes debug cannot ask the process."},
      {"HOLMES_FLIGHT_RECORDER_DIR", "folder", "nothing is written",
       "Where every rank writes its flight record when a communicator fails."},
      {"HOLMES_FLIGHT_RECORDER_SIGNAL", "USR1, USR2, HUP, QUIT", "none",
       "Signal on which a process writes its flight record."},
      {"HOLMES_TCP_CONGESTION", "a name in tcp_allowed_congestion_control",
       "the system's; reno between ranks of one host", "Congestion control of every data socket."},
      {"HOLMES_HIERARCHICAL_MIN_BYTES", "bytes, or never", "measured when the communicator is made",
       "From how many bytes on an operation over clusters runs hierarchically; equal on all ranks."},
      {"HOLMES_PINNED_RING_BYTES", "bytes, 65536 to 1073741824", "4194304",
       "Page-locked memory for sends or receives of a GPU's memory, for each peer and direction that has any."},
      {"HOLMES_NCCL_LIBRARY", "path", "the loaded one, the Python package's, the system's", "The NCCL library to use."},
      {"HOLMES_CUDA_LIBRARY", "path", "libcuda.so.1", "The CUDA driver to use."},
      {"HOLMES_NCCL_IMAGE", "sparse, copy", "sparse", "Form of the further NCCL images; copy where sparse fails."},
      {"HOLMES_NCCL_IMAGE_FOLDER", "path", "TMPDIR, /var/tmp, /tmp, /dev/shm: the first that works",
       "Folder for copies of the NCCL library."},
  };
  return variables;
}

std::string host_name() {
  if (const auto name = text_of("HOLMES_HOSTNAME")) return *name;
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

}  // namespace holmes
