// The Python module holmes_comm._c10d. Import torch first: its libraries are found in the process, not on disk.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include "bindings/gil.hpp"
#include "bindings/nccl_settings.hpp"
#include "bindings/python_values.hpp"
#include "nccl_memory.hpp"
#include "process_group_holmes.hpp"
#include "shared_tensors.hpp"
#include "store_adapter.hpp"

namespace py = pybind11;

namespace holmes::torch_backend {
namespace {

// What Python agreed on for an NCCL communicator: transport, HCA ports, interfaces, GID index, NCCL variables, NCCL
// host id, NICs of the host-memory communicator beside it, libraries of Python packages.
using DevicePlan = std::tuple<std::string, std::vector<std::string>, std::vector<std::string>, std::optional<int>,
                              std::map<std::string, std::string>, std::string, NicPairs, std::vector<std::string>>;

// Held by C++ threads too; let go of with the GIL.
std::shared_ptr<py::object> shared(const py::object& object) {
  return {new py::object(object), [](py::object* held) {
            const GilAcquire gil;
            delete held;
          }};
}

ProcessGroupHolmes::Split splitter(const py::object& split) {
  if (split.is_none()) return nullptr;
  return [held = shared(split)](const std::vector<int>& members, Duration timeout) {
    const GilAcquire gil;
    return (*held)(members, timeout).cast<std::pair<c10::intrusive_ptr<ProcessGroupHolmes>, bool>>();
  };
}

DeviceCommunicators::Make device_maker(const py::object& agree, c10::intrusive_ptr<::c10d::Store> store,
                                       const CommunicatorOptions& options, const nccl::Settings& settings) {
  if (agree.is_none()) return nullptr;
  return [held = shared(agree), store = std::move(store), options, settings](int device, const std::string& name,
                                                                             std::vector<int> members) {
    CommunicatorOptions own = options;
    own.name = name;
    own.size = static_cast<int>(members.size());
    own.rank = static_cast<int>(std::ranges::find(members, options.rank) - members.begin());
    own.clusters.clear();
    own.cluster_names.clear();
    own.cluster_nics.clear();
    own.connect_timeout = own.timeout;  // the ranks come when their first operation does
    NcclOptions nccl;
    nccl.settings = settings;
    nccl.device = device;
    nccl.frees_in_stream_order = true;
    {
      const GilAcquire gil;
      const auto [net, hcas, interfaces, gid_index, variables, host_id, nics, packages] =
          (*held)(name, own.rank, own.size).cast<DevicePlan>();
      nccl.profile = {.net = nccl::net_from_name(net),
                      .hcas = hcas,
                      .interfaces = interfaces,
                      .gid_index = gid_index,
                      .host_id = host_id,
                      .variables = variables};
      nccl.package_paths = packages;
      own.nics = to_bindings(nics);
    }
    return make_nccl_communicator(std::make_shared<StoreAdapter>(store), std::move(own), std::move(nccl));
  };
}

c10::intrusive_ptr<ProcessGroupHolmes> create(const c10::intrusive_ptr<::c10d::Store>& store,
                                              const py::object& given_options, std::vector<std::uint64_t> global_ranks,
                                              std::string nic_reason, const py::object& agree_device,
                                              const py::object& split, const py::dict& nccl_settings,
                                              bool blocking_wait, bool nan_check) {
  CommunicatorOptions options = options_of(given_options);
  auto make_device = device_maker(agree_device, store, options, settings_of(nccl_settings));
  auto make_split = splitter(split);
  const GilRelease no_gil;
  return c10::make_intrusive<ProcessGroupHolmes>(store, std::move(options), std::move(global_ranks),
                                                 std::move(nic_reason), std::move(make_device), std::move(make_split),
                                                 Habits{blocking_wait, nan_check});
}

// What torch's allocator has of the GPU's memory for a torch.cuda.MemPool: addresses and bytes.
std::vector<std::pair<void*, std::size_t>> segments_of(const py::object& pool) {
  std::vector<std::pair<void*, std::size_t>> segments;
  for (const py::handle& segment : pool.attr("snapshot")())
    segments.emplace_back(reinterpret_cast<void*>(segment["address"].cast<std::uintptr_t>()),
                          segment["total_size"].cast<std::size_t>());
  return segments;
}

py::list connections(const ProcessGroupHolmes& group) {
  const auto infos = [&] {
    const GilRelease no_gil;
    auto all = group.communicator()->connections();
    if (const auto sparse = group.sparse().communicator())
      std::ranges::copy(sparse->connections(), std::back_inserter(all));
    return all;
  }();
  py::list rows;
  for (const auto& info : infos) rows.append(to_dict(info));
  return rows;
}

}  // namespace

PYBIND11_MODULE(_c10d, m) {
  m.doc() = "The c10d backend 'holmes' (see holmes_comm.torch_backend).";
  py::module_::import("torch.distributed");
  register_translator();
  py::class_<HolmesOptions, ::c10d::Backend::Options, c10::intrusive_ptr<HolmesOptions>>(
      m, "Options", "Timeout, name and ranks of a group.")
      .def("__deepcopy__",
           [](const HolmesOptions& options, const py::dict&) { return c10::make_intrusive<HolmesOptions>(options); });
  py::class_<ProcessGroupHolmes, ::c10d::Backend, c10::intrusive_ptr<ProcessGroupHolmes>>(
      m, "ProcessGroupHolmes", "CPU tensors over one Holmes communicator, CUDA tensors over NCCL.")
      .def(py::init(&create), py::arg("store"), py::arg("options"), py::kw_only(), py::arg("global_ranks"),
           py::arg("nic_reason"), py::arg("agree_device") = py::none(), py::arg("split") = py::none(),
           py::arg("nccl_settings") = py::dict(), py::arg("blocking_wait") = false, py::arg("nan_check") = false,
           "Collective over the group: connects it as `options`, a CommunicatorOptions, says. "
           "`agree_device(name, rank, size)`, collective over the ranks of an NCCL communicator, says what it may use. "
           "`split(members, timeout)`, collective over these ranks of the group, makes a group of them, and says "
           "whether "
           "its NCCL communicator is to be split from the group's. `nccl_settings`: of NcclSettings, those that are "
           "set. "
           "`blocking_wait`: a wait for an operation on a GPU blocks the host. `nan_check`: NaN in what is read is an "
           "error.")
      .def_property_readonly("nic_reason", &ProcessGroupHolmes::nic_reason, "Why the group is on these NICs.")
      .def_property_readonly("options", &ProcessGroupHolmes::getBackendOptions,
                             "Backend options: timeout, name, ranks.")
      .def("_set_default_timeout", &ProcessGroupHolmes::setTimeout, py::arg("timeout"), "As the built-in backends'.")
      .def_property_readonly(
          "device_descriptions",
          [](const ProcessGroupHolmes& group) {
            std::vector<std::string> texts;
            for (const auto& communicator : group.devices().made()) texts.push_back(communicator->description());
            return texts;
          },
          "NCCL's version, library and NICs of each NCCL communicator that was needed so far.")
      .def(
          "perform_nocolor_split", [](const ProcessGroupHolmes&, const py::object&) {}, py::arg("device"),
          "Nothing: ranks outside of a new group have no part in its connections.")
      .def("drop_coalescing", &ProcessGroupHolmes::drop_coalescing,
           "Ends the thread's coalescing block, if there is one, without the messages in it. Local.")
      .def("stay_out_of_split", &ProcessGroupHolmes::stay_out_of_split,
           "A rank's part in a split of the group's NCCL communicator from which it gets nothing.")
      .def_property_readonly(
          "mem_allocator",
          [](const ProcessGroupHolmes&) {
            translated([&] {
              check_nccl_memory();
              return 0;
            });
            return py::module_::import("torch._C")
                .attr("_cuda_customAllocator")(reinterpret_cast<std::uintptr_t>(&allocate_nccl_memory),
                                               reinterpret_cast<std::uintptr_t>(&free_nccl_memory));
          },
          "NCCL's memory, for torch.cuda.MemPool(backend.mem_allocator).")
      .def(
          "register_mem_pool",
          [](ProcessGroupHolmes& group, const py::object& pool, bool symm) {
            const auto segments = segments_of(pool);
            const GilRelease no_gil;
            translated([&] {
              for (const auto& [address, bytes] : segments) group.register_memory(address, bytes, symm);
              return 0;
            });
          },
          py::arg("pool"), py::arg("symm") = false,
          "Registers what the torch.cuda.MemPool has now with the group's NCCL communicator, which may then move it "
          "without copies. `symm`: as symmetric memory, collective over the group.")
      .def(
          "deregister_mem_pool",
          [](ProcessGroupHolmes& group, const py::object& pool) {
            const auto segments = segments_of(pool);
            const GilRelease no_gil;
            translated([&] {
              for (const auto& [address, bytes] : segments) group.deregister_memory(address);
              return 0;
            });
          },
          py::arg("pool"), "Ends what register_mem_pool began, for what the pool still has.")
      .def("connections", &connections, "One dict per connection, as ConnectionInfo.");
  m.def(
      "share_tensors_from",
      [](std::size_t min_bytes) {
        translated([&] {
          share_tensors_from(min_bytes);
          return 0;
        });
      },
      py::arg("min_bytes"),
      "Local, of the process. Torch's tensors on the processor of at least so many bytes are made in shared memory "
      "from "
      "now on; 0: none. Raises UsageError beside another library's allocator.");
  m.def("hold_other_threads", &hold_other_threads,
        "Local. The interpreter is about to end: a thread that is in a call of a group, or makes one, does not return "
        "from it. Only the calling thread's do.");
}

}  // namespace holmes::torch_backend
