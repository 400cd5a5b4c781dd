#include "holmes/core/env.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string_view>
#include <type_traits>

#include "holmes/core/cpu_list.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/text.hpp"

namespace holmes {
namespace {

std::optional<std::string> text_of(const std::string& variable) {
  const char* text = std::getenv(variable.c_str());
  if (text == nullptr || *text == '\0') return std::nullopt;
  return std::string(text);
}

// What a variable was set to.
struct Given {
  std::string variable;
  std::string value;

  [[noreturn]] void refuse(const std::string& rule, const std::string& example) const {
    throw UsageError(variable + "='" + value + "' is not allowed: it must be " + rule + "; say for example " + example +
                     " or unset it");
  }
};

// Puts a variable's value into its field. Throws UsageError naming variable, value, rule and fix.
using Reader = std::function<void(Env&, const Given&)>;

template <class Number>
std::optional<Number> number_from(const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return number;
}

Reader text(std::optional<std::string> Env::* field) {
  return [=](Env& env, const Given& given) { env.*field = given.value; };
}

template <class Value>
Reader choice(Value Env::* field, std::vector<std::pair<std::string, Value>> values) {
  return [=](Env& env, const Given& given) {
    std::string rule;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i].first == given.value) {
        env.*field = values[i].second;
        return;
      }
      rule += (i == 0 ? "" : i + 1 == values.size() ? " or " : ", ") + values[i].first;
    }
    given.refuse(rule, values.back().first);
  };
}

template <class Number>
Number whole_number(const Given& given, Number least, Number most, Number example) {
  const auto value = number_from<Number>(given.value);
  if (!value || *value < least || *value > most)
    given.refuse("a whole number from " + std::to_string(least) + " to " + std::to_string(most),
                 std::to_string(example));
  return *value;
}

template <class Number>
Reader number(Number Env::* field, std::type_identity_t<Number> least, std::type_identity_t<Number> most) {
  return [=](Env& env, const Given& given) { env.*field = whole_number(given, least, most, Env{}.*field); };
}

Reader optional_number(std::optional<int> Env::* field, int least, int most) {
  return [=](Env& env, const Given& given) { env.*field = whole_number(given, least, most, least); };
}

template <class Field>
Reader seconds(Field Env::* field) {
  return [=](Env& env, const Given& given) {
    const auto value = number_from<double>(given.value);
    if (!value || !std::isfinite(*value) || *value <= 0 || *value > 1e6)
      given.refuse("a number of seconds above 0 and at most 1000000", "60");
    env.*field = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(*value));
  };
}

void read_log(Env& env, const Given& given) {
  const auto level = log_level_from_name(given.value);
  if (!level) given.refuse("error, warn, info or debug", "info");
  env.log = *level;
}

void read_port_range(Env& env, const Given& given) {
  const auto dash = given.value.find('-');
  if (dash != std::string::npos) {
    const auto first = number_from<std::uint16_t>(given.value.substr(0, dash));
    const auto last = number_from<std::uint16_t>(given.value.substr(dash + 1));
    if (first && last && *first > 0 && *first <= *last) {
      env.port_range = {*first, *last};
      return;
    }
  }
  given.refuse("two ports from 1 to 65535, 'first-last'", "40000-40100");
}

void read_spin(Env& env, const Given& given) {
  const auto microseconds = number_from<int>(given.value);
  if (!microseconds || *microseconds < 0 || *microseconds > 1'000'000)
    given.refuse("a whole number of microseconds from 0 to 1000000", "50");
  env.spin = std::chrono::microseconds(*microseconds);
}

void read_io_cpus(Env& env, const Given& given) {
  const auto cpus = cpu_list_from(given.value);
  env.io_cpus_near_nic = given.value == "numa";
  if (!cpus && !env.io_cpus_near_nic) given.refuse("processors as '2,4-7', or numa", "0-3");
  env.io_cpus = cpus.value_or(std::vector<int>{});
}

void read_hierarchical_min_bytes(Env& env, const Given& given) {
  env.hierarchical_min_bytes = given.value == "never" ? UINT64_MAX : number_from<std::uint64_t>(given.value);
  if (!env.hierarchical_min_bytes) given.refuse("a whole number of bytes, or never", "65536");
}

void read_rdma_direct_bytes(Env& env, const Given& given) {
  const auto bytes = given.value == "never" ? SIZE_MAX : number_from<std::size_t>(given.value).value_or(0);
  if (bytes == 0) given.refuse("a whole number of bytes above 0, or never", "524288");
  env.rdma_direct_bytes = bytes;
}

void read_signal(Env& env, const Given& given) {
  const std::string name = given.value.starts_with("SIG") ? given.value.substr(3) : given.value;
  const std::pair<const char*, int> signals[] = {
      {"USR1", SIGUSR1}, {"USR2", SIGUSR2}, {"HUP", SIGHUP}, {"QUIT", SIGQUIT}};
  for (const auto& [known, number] : signals)
    if (name == known) env.flight_recorder_signal = number;
  if (env.flight_recorder_signal == 0) given.refuse("USR1, USR2, HUP or QUIT", "USR1");
  if (!text_of("HOLMES_FLIGHT_RECORDER_DIR"))
    throw UsageError(given.variable + "='" + given.value +
                     "' needs a folder for what is written then; set HOLMES_FLIGHT_RECORDER_DIR too, or unset it");
}

// A variable, and how the engine reads it; nothing where only Python does.
struct Row {
  EnvVariable variable;
  Reader read;
};

// docs/environment.md, `holmes env` and `holmes doctor` show what stands here (Markdown).
const std::vector<Row>& table() {
  // Never destroyed: threads of a process that ends may read it still.
  static const std::vector<Row>& rows = *new std::vector<Row>{
      {{"HOLMES_NICS",
        "a NIC selection: `class:infiniband`, `class:roce`, `subnet:10.1.0.0/16`, `fastest`, `eth1,eth2`, `mlx5_0:1`, "
        "`mlx5_*`, `rails:2`, `streams:2`",
        "the fastest NIC that all ranks share",
        "NICs of every communicator and process group that names none: for scripts that cannot be edited. Words "
        "combine: `class:roce,rails:2` stripes over two RoCE NICs, `streams:2` opens two connections over each."},
       nullptr},
      {{"HOLMES_REPLACES", "`gloo`", "unset",
        "Groups for which a script or trainer names Gloo, also in `cpu:gloo,cuda:nccl`, are made by Holmes; read when "
        "torch is imported. For trainers that name it themselves, such as Accelerate."},
       nullptr},
      {{"HOLMES_CLUSTER", "a name", "no cluster",
        "Cluster this rank is in. Where the ranks of a group name several, its large collectives run "
        "[hierarchically](hierarchy.md)."},
       nullptr},
      {{"HOLMES_CLUSTER_NICS", "a NIC selection, as in `HOLMES_NICS`", "the fastest NIC that the cluster's ranks share",
        "NICs inside the cluster, for groups that span several; `HOLMES_NICS` then names those between clusters."},
       nullptr},
      {{"HOLMES_HIERARCHICAL_MIN_BYTES", "bytes, or `never`", "measured when the group is made",
        "From how many bytes on a group that spans clusters runs an operation hierarchically; equal on all ranks."},
       read_hierarchical_min_bytes},
      {{"HOLMES_WIDE_MIN_RANKS", "ranks, 2 to 2147483647", "257",
        "From how many ranks on a group is wide: its ranks are connected by rows and columns and not "
        "each with every other one ([many ranks](ranks.md#wide-groups)); equal on all ranks."},
       number(&Env::wide_min_ranks, 2, 2147483647)},
      {{"HOLMES_TRANSPORT", "`auto`, `tcp`, `shm`, `rdma`", "`auto`",
        "With `HOLMES_NICS`: shared memory between ranks of one host and else [RDMA](rdma.md) where all ranks share a "
        "fabric, TCP where not; TCP always; shared memory only; shared memory between ranks of one host and RDMA else. "
        "`tcp` and `shm` also keep groups whose selection is in the code, and says nothing of it, from RDMA."},
       text(&Env::transport)},
      {{"HOLMES_SHM", "`0`, `1`", "`1`", "`0`: ranks of one host use the network too."},
       choice(&Env::shm, {{"0", false}, {"1", true}})},
      {{"HOLMES_CMA", "`auto`, `always`, `0`", "`auto`",
        "Ranks of one host copy larger pieces out of each other's memory (`process_vm_readv`): where they measure that "
        "it takes less time than shared memory (collectives: all ranks together; messages of more ranks than the host "
        "has processors: those of more than four rings, 4 MiB to 9 ranks, or half a ring while the rank receives), for "
        "all "
        "pieces, never. Where the system "
        "forbids it (another PID namespace, a container's seccomp profile, `kernel.yama.ptrace_scope`) shared memory "
        "carries everything, also what is in arrays of `holmes_comm.empty`, which else is read where it is."},
       choice(&Env::cma, {{"auto", CmaUse::measured}, {"always", CmaUse::always}, {"0", CmaUse::never}})},
      {{"HOLMES_SECRET", "text, at least 16 bytes", "the content of `HOLMES_SECRET_FILE`",
        "The job's secret, the same on all ranks and clients of a `TcpStore`; who cannot prove it is dropped "
        "([security](security.md))."},
       text(&Env::secret)},
      {{"HOLMES_SECRET_FILE", "path", "rank 0 makes a secret and shares it through the store",
        "File whose content, less a final newline, is the job's secret."},
       text(&Env::secret_file)},
      {{"HOLMES_TLS", "`off`, `clusters`, `all`", "`off`",
        "TCP connections that are encrypted: none, those between ranks of different clusters, every one "
        "([security](security.md))."},
       choice(&Env::tls, {{"off", "off"}, {"clusters", "clusters"}, {"all", "all"}})},
      {{"HOLMES_INTEGRITY", "`0`, `1`", "`0`",
        "`1`: what arrives over TCP and shared memory, also by direct copies (`HOLMES_CMA`), is compared with what was "
        "sent, by CRC32C ([security](security.md))."},
       choice(&Env::integrity, {{"0", false}, {"1", true}})},
      {{"HOLMES_INTEGRITY_DIGEST_EVERY", "operations, 0 to 1000000000", "0",
        "Of so many all_reduce, all_gather and broadcast of a communicator one has its result compared over the ranks; "
        "`0`: none ([security](security.md))."},
       number(&Env::integrity_digest_every, 0, 1'000'000'000)},
      {{"HOLMES_LOCAL_COMPLETION", "`0`, `1`", "`0`",
        "`1`: broadcast, reduce, gather and scatter end on a rank when its own part is done, as with MPI, not when "
        "every rank has entered them ([algorithms](algorithms.md#local-completion))."},
       choice(&Env::local_completion, {{"0", false}, {"1", true}})},
      {{"HOLMES_SSL_LIBRARY", "path", "the system's `libssl.so.3`, else `libssl.so.1.1`",
        "The OpenSSL that TLS takes."},
       text(&Env::ssl_library)},
      {{"HOLMES_PORT_RANGE", "`first-last`, 1 to 65535", "the kernel chooses", "Ports of listening sockets."},
       read_port_range},
      {{"HOLMES_CONNECT_TIMEOUT_S", "seconds, above 0", "what the code says (60)",
        "Deadline of a communicator's set-up; wins over the code."},
       seconds(&Env::connect_timeout)},
      {{"HOLMES_RAIL_TIMEOUT_S", "seconds, above 0", "2",
        "A rail on which the peer acknowledges nothing for so long, though the system repeats it, is lost; the others "
        "go on ([rails](rails.md))."},
       seconds(&Env::rail_timeout)},
      {{"HOLMES_FAR_STREAMS", "1 to 16", "4; without bbr up to 16 in small groups",
        "Connections to a far rank that is reached over one NIC by one stream; all but the first are used only where "
        "that one is too slow ([far paths](wan.md#far-paths))."},
       optional_number(&Env::far_streams, 1, 16)},
      {{"HOLMES_UNEXPECTED_BYTES", "bytes, 0 to 2^40", "268435456",
        "So much of messages that arrived before their receives were posted a communicator keeps in memory, each "
        "counted as 128 bytes at least; more is an error."},
       number(&Env::unexpected_bytes, 0, std::uint64_t{1} << 40)},
      {{"HOLMES_TCP_CONGESTION", "a name in `net.ipv4.tcp_allowed_congestion_control`",
        "bbr on far paths, cubic or reno between near ranks of one kernel, else the system's",
        "Congestion control of every data socket."},
       text(&Env::tcp_congestion)},
      {{"HOLMES_VERBS_LIBRARY", "path", "`libibverbs.so.1`", "The verbs library that [RDMA](rdma.md) takes."},
       text(&Env::verbs_library)},
      {{"HOLMES_RDMA_GID_INDEX", "0 to 255", "RoCE: the port's RoCE v2 GID of its IP address; InfiniBand: none is used",
        "Entry of the port's GID table that RDMA uses; on InfiniBand it makes packets routable."},
       optional_number(&Env::rdma_gid_index, 0, 255)},
      {{"HOLMES_RDMA_MTU", "`256`, `512`, `1024`, `2048`, `4096`", "what both ports have",
        "Largest packet of RDMA in bytes."},
       choice(&Env::rdma_mtu, {{"256", 256}, {"512", 512}, {"1024", 1024}, {"2048", 2048}, {"4096", 4096}})},
      {{"HOLMES_RDMA_PKEY_INDEX", "0 to 127", "0", "Entry of the port's P_Key table: its InfiniBand partition."},
       number(&Env::rdma_pkey_index, 0, 127)},
      {{"HOLMES_RDMA_SERVICE_LEVEL", "0 to 15", "0", "InfiniBand service level; the priority on RoCE v1."},
       number(&Env::rdma_service_level, 0, 15)},
      {{"HOLMES_RDMA_TRAFFIC_CLASS", "0 to 255", "0",
        "Traffic class of RoCE v2 packets: four times the DSCP that the switches prefer."},
       number(&Env::rdma_traffic_class, 0, 255)},
      {{"HOLMES_RDMA_TIMEOUT", "1 to 31", "18",
        "How long the HCA waits for an acknowledgement before it sends again: 4.096 us times 2 to the power of it "
        "(18: a second)."},
       number(&Env::rdma_timeout, 1, 31)},
      {{"HOLMES_RDMA_RETRIES", "0 to 7", "7", "How often it sends again before the peer is lost."},
       number(&Env::rdma_retries, 0, 7)},
      {{"HOLMES_RDMA_DIRECT_BYTES", "bytes above 0, or `never`", "1048576",
        "Messages, and what collectives send a peer in one run, of so many bytes go from the sender's memory straight "
        "into the receiver's, which are registered with the HCAs; smaller ones are copied through rings (of a GPU's "
        "messages those below 65536). `never`: to this rank too."},
       read_rdma_direct_bytes},
      {{"HOLMES_RDMA_KEEP_REGISTERED", "`0`, `1`", "`1`",
        "Ordinary memory that such messages used twice stays registered with the HCAs until it is unmapped, up to an "
        "eighth of the memory that may be locked, and a quarter of all. `0`: each message registers it anew "
        "([RDMA](rdma.md#registered-memory))."},
       choice(&Env::rdma_keep_registered, {{"0", false}, {"1", true}})},
      {{"HOLMES_RDMA_GPUDIRECT", "`off`, `dmabuf`, `peermem`", "`off`",
        "Messages of a GPU's memory of `HOLMES_RDMA_DIRECT_BYTES` or more go from GPU to GPU by the HCAs, without host "
        "memory: registered by dma-buf, or by the module nvidia_peermem. An error where this rank has it not. Never "
        "run on a GPU so far ([RDMA](rdma.md#gpudirect))."},
       choice(&Env::rdma_gpudirect,
              {{"off", GpuDirect::off}, {"dmabuf", GpuDirect::dmabuf}, {"peermem", GpuDirect::peermem}})},
      {{"HOLMES_SPIN_US", "microseconds, 0 to 1000000", "150",
        "How long a waiting thread polls before it blocks. Large transfers over sockets are polled only where pieces "
        "of 64 KiB come faster than that, else slept for."},
       read_spin},
      {{"HOLMES_IO_THREADS", "1 to 64", "1",
        "Threads that move the bytes of asynchronous operations; the communicators of a process take turns over them "
        "([many ranks](ranks.md))."},
       number(&Env::io_threads, 1, 64)},
      {{"HOLMES_IO_CPUS", "processors as `2,4-7`, or `numa`", "the kernel chooses",
        "Processors of these threads, never of the caller's. `numa`: those of the NUMA node of the communicator's "
        "first NIC, where it has one; then `HOLMES_IO_THREADS` is for each such node."},
       read_io_cpus},
      {{"HOLMES_PINNED_RING_BYTES", "bytes, 65536 to 1073741824", "4194304",
        "Page-locked memory for sends or receives of a GPU's memory, for each peer and direction that has any ([GPU "
        "memory](gpu.md))."},
       number(&Env::pinned_ring_bytes, 65536, 1073741824)},
      {{"HOLMES_NCCL_LIBRARY", "path", "the NCCL that is already loaded, else the Python package's, else the system's",
        "The NCCL library to use."},
       text(&Env::nccl_library)},
      {{"HOLMES_NCCL_NET", "`socket`, `holmes`", "`socket`",
        "What carries NCCL's groups on Ethernet whose `NcclSettings` say nothing: NCCL's own sockets, or Holmes as "
        "[NCCL's "
        "network plugin](plugin.md#groups-of-holmes-itself) (NCCL 2.28 and later, with `NCCL_NET_PLUGIN=holmes`). "
        "Equal "
        "on all ranks."},
       nullptr},
      {{"HOLMES_CUDA_LIBRARY", "path", "`libcuda.so.1`", "The CUDA driver to use."}, text(&Env::cuda_library)},
      {{"HOLMES_NCCL_IMAGE", "`sparse`, `copy`", "`sparse`; where that fails, `copy`",
        "Form of the further NCCL images: a few MiB in memory with the GPU code mapped from the library's own file, or "
        "a whole copy of it."},
       choice(&Env::nccl_image, {{"sparse", NcclImageForm::sparse}, {"copy", NcclImageForm::copy}})},
      {{"HOLMES_NCCL_IMAGE_FOLDER", "folder", "`TMPDIR`, `/var/tmp`, `/tmp`, `/dev/shm`: the first that works",
        "Where such copies are kept; they have no name and vanish with the process."},
       text(&Env::nccl_image_folder)},
      {{"HOLMES_FLIGHT_RECORDER", "operations, 0 to 1000000", "256",
        "Operations that each communicator remembers for diagnosis. `0`: none, and [`holmes debug`](debug.md) cannot "
        "ask the process."},
       number(&Env::flight_recorder_operations, 0, 1000000)},
      {{"HOLMES_FLIGHT_RECORDER_DIR", "folder", "nothing is written",
        "Where every rank writes its flight record when a communicator fails; one folder for all hosts, where they "
        "share one."},
       text(&Env::flight_recorder_folder)},
      {{"HOLMES_FLIGHT_RECORDER_SIGNAL", "`USR1`, `USR2`, `HUP`, `QUIT`", "none",
        "Signal on which a process writes its flight record there."},
       read_signal},
      {{"HOLMES_METRICS_PORT", "port, 1 to 65535", "not served",
        "Metrics over HTTP at this port plus `LOCAL_RANK`: `/metrics` (Prometheus), `/metrics.json`."},
       nullptr},
      {{"HOLMES_METRICS_ADDRESS", "IP address of this host, `0.0.0.0` or `::`: all", "`127.0.0.1`",
        "Where that port listens. Whoever reaches it reads names of hosts and groups, and counts; there is no "
        "password."},
       nullptr},
      {{"XDG_RUNTIME_DIR", "folder", "`/tmp/holmes-<uid>`",
        "Each process has its private socket for `holmes debug` in `holmes/` there."},
       nullptr},
      {{"HOLMES_LOG", "`error`, `warn`, `info`, `debug`", "`warn`",
        "What is written to stderr; read once per process. From `info` on a line for each group: its NICs, and why."},
       read_log},
      {{"HOLMES_STORE", "host:port or `etcd://host:port,...`", "none; `run_elastic` needs it or `store=`",
        "Where `holmes store` or an etcd 3 serves the store of an elastic job ([recovery](recovery.md))."},
       nullptr},
      {{"HOLMES_HOSTNAME", "text", "what `gethostname` says", "Name of this host in messages."}, text(&Env::hostname)},
      {{"HOLMES_SYSFS_ROOT", "folder", "`/sys`",
        "Where NIC discovery reads: another machine's recorded tree, for tests and for the testbed."},
       nullptr},
      {{"HOLMES_TESTBED", "set by `holmes testbed`", "unset", "Says to a process that it runs on an emulated node."},
       nullptr},
      {{"HOLMES_UML_KERNEL", "file", "none; testbeds of kernels need it",
        "The user-mode Linux of testbeds with real RDMA ([RDMA](rdma.md)), packed (.xz) or not."},
       nullptr},
      {{"HOLMES_VERBS_ROOT", "folder", "downloaded from Debian",
        "Where such testbeds find libibverbs and its tools, below `usr`."},
       nullptr},
      {{"HOLMES_FALSE_CLOCK", "set by `holmes stress`", "unset",
        "File with the offset of one rank's wall clock, for the preloaded library of the fault `clock-jump`."},
       nullptr},
      {{"HOLMES_FAULTY_CALLS", "set by `holmes stress`", "unset",
        "File by which one rank's system calls err, for the preloaded library of the faults `flipped-bit` and "
        "`no-threads`."},
       nullptr},
      {{"HOLMES_BENCH_JOB_NETWORK_FD", "set by `holmes bench --testbed`", "unset",
        "Descriptor of the network in which a rank finds mpirun, where that is not its own."},
       nullptr},
  };
  return rows;
}

// Letters to change, add or leave out.
std::size_t edit_distance(std::string_view one, std::string_view other) {
  std::vector<std::size_t> row(other.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < one.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < other.size(); ++j) {
      const std::size_t changed = diagonal + (one[i] == other[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({changed, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

// HOLMES_LOG and HOLMES_LOG_LEVEL.
bool begins_alike(std::string_view one, std::string_view other) {
  const auto [shorter, longer] = std::minmax(one, other, [](auto a, auto b) { return a.size() < b.size(); });
  return longer.starts_with(shorter) && longer.substr(shorter.size()).starts_with('_');
}

bool warn_of_misspelt_names() {
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view name = std::string_view(*entry).substr(0, std::string_view(*entry).find('='));
    if (!name.starts_with("HOLMES_")) continue;
    if (const auto meant = variable_meant_by(name))
      log(LogLevel::warn, std::nullopt,
          "the environment variable " + std::string(name) + " means nothing to Holmes; is " + *meant +
              " meant? (`holmes env` lists all)");
  }
  return true;
}

}  // namespace

Env Env::read() {
  [[maybe_unused]] static const bool warned = warn_of_misspelt_names();
  Env env;
  for (const auto& [variable, read] : table())
    if (const auto value = read ? text_of(variable.name) : std::nullopt) read(env, {variable.name, *value});
  return env;
}

std::vector<EnvVariable> env_variables() {
  std::vector<EnvVariable> variables;
  for (const auto& row : table()) variables.push_back(row.variable);
  return variables;
}

std::optional<std::string> variable_meant_by(std::string_view name) {
  // NCCL's and Gloo's words.
  if (name.ends_with("_IFNAME") || name.ends_with("_HCA")) return "HOLMES_NICS";
  if (name.ends_with("_GID_INDEX") && name != "HOLMES_RDMA_GID_INDEX") return "HOLMES_RDMA_GID_INDEX";
  if (name == "HOLMES_DEBUG") return "HOLMES_LOG";
  std::optional<std::string> meant;
  std::size_t least = 3;
  for (const auto& row : table()) {
    const std::size_t distance = begins_alike(name, row.variable.name) ? 2 : edit_distance(name, row.variable.name);
    if (distance == 0) return std::nullopt;
    if (distance < least) meant = row.variable.name, least = distance;
  }
  return meant;
}

std::string host_name() {
  if (const auto name = text_of("HOLMES_HOSTNAME")) return readable(*name);
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return readable(name.data());
}

}  // namespace holmes
