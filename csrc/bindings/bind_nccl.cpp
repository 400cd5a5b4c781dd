// NCCL for Python: communicators for device memory, and what NCCL there is.
#include <pybind11/stl.h>

#include "bindings/bind_buffer.hpp"
#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/nccl_settings.hpp"
#include "bindings/python_values.hpp"
#include "holmes/nccl/nccl_communicator.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

using Paths = std::vector<std::string>;

nccl::Profile to_profile(const std::string& net, const Paths& hcas, const Paths& interfaces,
                         const std::optional<int>& gid_index, const std::map<std::string, std::string>& variables,
                         const std::string& host_id) {
  return {.net = nccl::net_from_name(net),
          .hcas = hcas,
          .interfaces = interfaces,
          .gid_index = gid_index,
          .host_id = host_id,
          .variables = variables};
}

py::dict library(const Paths& package_paths) {
  const nccl::Library& found = nccl::stock_library(package_paths);
  return py::dict("path"_a = found.path, "found_by"_a = found.found_by, "version"_a = found.api.version,
                  "version_text"_a = nccl::version_text(found.api.version));
}

py::dict choose(const nccl::Profile& profile, const Paths& package_paths, const std::optional<std::string>& root) {
  const nccl::Chosen chosen = nccl::choose(profile, discover_nics(root.value_or(default_sysfs_root())), package_paths);
  return py::dict("image"_a = chosen.image ? chosen.image->text() : "", "reason"_a = chosen.reason,
                  "profile"_a = profile.text(), "notes"_a = chosen.notes);
}

py::bytes unique_id(const nccl::Profile& profile, const Paths& package_paths, const std::optional<std::string>& root) {
  const nccl::Chosen chosen = nccl::choose(profile, discover_nics(root.value_or(default_sysfs_root())), package_paths);
  nccl::UniqueId id{};
  const nccl::Result result = chosen.api->get_unique_id(&id);
  if (result != nccl::success) throw CommunicatorError(chosen.api->describe(result));
  return {id.internal, sizeof(id.internal)};
}

std::shared_ptr<NcclCommunicator> make(const py::object& store, CommunicatorOptions options,
                                       const nccl::Profile& profile, int device, const Paths& package_paths,
                                       const std::optional<std::string>& sysfs_root, const py::dict& settings) {
  std::shared_ptr<Store> native = to_store(store);
  NcclOptions nccl_options{profile, settings_of(settings), device, package_paths,
                           sysfs_root.value_or(default_sysfs_root())};
  const GilRelease no_gil;
  return make_nccl_communicator(std::move(native), std::move(options), std::move(nccl_options));
}

// A group as a Python context manager.
class NcclGroup {
public:
  NcclGroup(std::shared_ptr<NcclCommunicator> comm, bool async_op, const TimeoutSeconds& timeout_s)
      : comm_(std::move(comm)) {
    call_.async = async_op;
    if (timeout_s) call_.timeout = to_duration("timeout_s", *timeout_s);
  }
  void enter() { comm_->start_group(); }
  void exit(bool has_error) {
    if (has_error) return comm_->abandon_group();
    const GilRelease no_gil;
    work_ = comm_->end_group(call_);
    if (!call_.async) work_->join();
  }
  WorkPtr work() const {
    if (!work_) throw UsageError("the group has not ended; take its work after the with block");
    return work_;
  }

private:
  std::shared_ptr<NcclCommunicator> comm_;
  CallOptions call_;
  WorkPtr work_;
};

void bind_group(py::module_& module) {
  py::class_<NcclGroup, std::shared_ptr<NcclGroup>>(
      module, "NcclGroup", "Operations that NCCL launches together; see NcclCommunicator.group. One thread's.")
      .def(
          "__enter__",
          [](const std::shared_ptr<NcclGroup>& self) {
            self->enter();
            return self;
          },
          "Opens the group.")
      .def(
          "__exit__",
          [](NcclGroup& self, const py::object& type, const py::object&, const py::object&) {
            self.exit(!type.is_none());
          },
          "type"_a, "value"_a, "traceback"_a, "Starts what the block called; nothing of it after an exception.")
      .def_property_readonly("work", &NcclGroup::work, "The Work of all of them, after the block.");
}

void define_nccl(py::module_& module) {
  bind_group(module);
  py::class_<nccl::Profile>(module, "NcclProfile", "What one NCCL communicator may use of this host's NICs. Immutable.")
      .def(
          py::init(&to_profile), "net"_a, "hcas"_a = Paths{}, "interfaces"_a = Paths{}, "gid_index"_a = py::none(),
          "variables"_a = std::map<std::string, std::string>{}, "host_id"_a = "",
          "`net`: 'IB' (InfiniBand and RoCE), 'Socket', 'holmes' (NCCL's plugin) or 'Site'. `hcas`: ports ('mlx5_0:1') "
          "of net IB.\n`interfaces`: those that carry data (Socket, holmes), or where ranks shake hands (IB). "
          "`gid_index`: of RoCE. `variables`: further NCCL "
          "variables for this\nprofile alone. `host_id`: makes NCCL take this rank for one of another host.")
      .def_readonly("hcas", &nccl::Profile::hcas, "Ports of net IB.")
      .def_readonly("interfaces", &nccl::Profile::interfaces, "Network interfaces.")
      .def_readonly("gid_index", &nccl::Profile::gid_index, "GID index of RoCE ports; None: NCCL's choice.")
      .def_readonly("variables", &nccl::Profile::variables, "Further NCCL variables.")
      .def_readonly("host_id", &nccl::Profile::host_id, "Takes the host's place in NCCL; empty: the host itself.")
      .def_property_readonly(
          "net", [](const nccl::Profile& profile) { return std::string(nccl::net_name(profile.net)); },
          "'IB', 'Socket', 'holmes' or 'Site'.")
      .def("__repr__", [](const nccl::Profile& profile) { return "<NcclProfile " + profile.text() + ">"; });
  py::class_<NcclCommunicator, Communicator, std::shared_ptr<NcclCommunicator>>(
      module, "NcclCommunicator",
      "A group of ranks on NCCL, bound to its NICs: torch CUDA tensors, cupy arrays, anything with "
      "__cuda_array_interface__ or\nDLPack. Calls return when the operation is on the device; see Work.wait_stream.")
      .def_property_readonly("description", &NcclCommunicator::description,
                             "NCCL's version, which library or image, the NICs and why.")
      .def(
          "register_buffer",
          [](NcclCommunicator& self, const py::object& tensor) {
            const Buffer buffer = to_buffer(tensor, {"register_buffer: tensor", true, true, self.device()});
            return reinterpret_cast<std::uintptr_t>(self.register_buffer(buffer));
          },
          "tensor"_a,
          "Registers memory with NCCL (2.19 and later), which may then move it without copies. Keep the "
          "tensor\nuntil deregister_buffer. Returns a handle. Local.")
      .def(
          "deregister_buffer",
          [](NcclCommunicator& self, std::uintptr_t handle) {
            self.deregister_buffer(reinterpret_cast<void*>(handle));
          },
          "handle"_a, "Undoes register_buffer. Local.")
      .def(
          "group",
          [](const std::shared_ptr<NcclCommunicator>& self, bool async_op, const TimeoutSeconds& timeout_s) {
            return std::make_shared<NcclGroup>(self, async_op, timeout_s);
          },
          "async_op"_a = false, "timeout_s"_a = py::none(),
          "A context manager: what its block calls on this communicator in this thread becomes one NCCL group, "
          "launched "
          "together\nat its end; no call of the block waits. All ranks make the same groups. `async_op`, `timeout_s`: "
          "of "
          "the group.")
      .def(
          "shrink", &NcclCommunicator::shrink, "excluded"_a, py::call_guard<GilRelease>(),
          "Collective over the ranks that are not in `excluded`: a communicator of them, in the same order; this one "
          "ends. For\nranks that are lost (also where this communicator has failed) or leave. NCCL 2.27 and later make "
          "it from this one's\nconnections where nothing has failed.");
  module.def("nccl_library", &library, "package_paths"_a = Paths{},
             "The NCCL of this process: dict of path, found_by, version (21803 is 2.18.3), version_text. "
             "`package_paths`: libraries\nof Python packages, tried after a loaded one and before the system's. Local. "
             "Raises UsageError where there is none.");
  module.def(
      "nccl_choose", &choose, "profile"_a, "package_paths"_a = Paths{}, "sysfs_root"_a = py::none(),
      "Checks the profile against this host's NICs and finds or makes the NCCL for it: dict of image (empty: the "
      "stock\nlibrary), reason, profile, notes (settings of the site, warnings). Local. Raises NicError, "
      "UsageError, SystemError.");
  module.def("nccl_unique_id", &unique_id, "profile"_a, "package_paths"_a = Paths{}, "sysfs_root"_a = py::none(),
             "Opens a rendezvous of that NCCL, which stays open as long as the process; its 128 bytes hold the address "
             "(from byte\n8 on a sockaddr). For checks: it shows the interface that NCCL takes. Local.");
  module.def("make_nccl_communicator", &make, "store"_a, "options"_a, "profile"_a, "device"_a,
             "package_paths"_a = Paths{}, "sysfs_root"_a = py::none(), "settings"_a = py::dict(),
             "Collective over the ranks that share `store`: an NCCL communicator on `profile`, with a communicator for "
             "host memory\nover the NICs of `options` beside it. `settings`: of NcclSettings, those that are set. "
             "holmes_comm.init\nchooses all of it and calls this.");
}

}  // namespace
}  // namespace holmes

void bind_nccl(py::module_& module) { holmes::define_nccl(module); }
