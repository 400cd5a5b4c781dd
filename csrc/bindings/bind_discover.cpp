#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.hpp"
#include "gil.hpp"
#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/discover/host.hpp"
#include "holmes/discover/nic.hpp"
#include "holmes/discover/pci.hpp"
#include "holmes/transport/rdma/device.hpp"
#include "holmes/transport/rdma/probe.hpp"

namespace py = pybind11;
using namespace py::literals;
using holmes::Nic;

namespace {

holmes::Duration seconds(double count) {
  return std::chrono::duration_cast<holmes::Duration>(std::chrono::duration<double>(count));
}

std::vector<std::string> address_texts(const Nic& nic) {
  std::vector<std::string> texts;
  for (const auto& address : nic.addresses)
    texts.push_back(address.address + "/" + std::to_string(address.prefix_length));
  return texts;
}

py::dict to_dict(const Nic& nic) {
  py::list gids;
  for (const auto& gid : nic.gids) {
    py::dict entry;
    entry["index"] = gid.index;
    entry["gid"] = gid.gid;
    entry["type"] = gid.type;
    entry["netdev"] = gid.netdev;
    gids.append(entry);
  }
  py::dict result;
  result["name"] = nic.name;
  result["nic_class"] = to_string(nic.nic_class);
  result["kind"] = to_string(nic.kind);
  result["netdev"] = nic.netdev;
  result["hca"] = nic.hca;
  result["port"] = nic.port;
  result["link_layer"] = nic.link_layer;
  result["state"] = nic.state;
  result["is_up"] = nic.is_up;
  result["is_netdev_up"] = nic.is_netdev_up;
  result["addresses"] = address_texts(nic);
  result["has_gateway"] = nic.has_gateway;
  result["speed_gbps"] = nic.speed_gbps;
  result["mtu"] = nic.mtu;
  result["numa_node"] = nic.numa_node;
  result["pci_address"] = nic.pci_address;
  result["pci_path"] = nic.pci_path;
  result["gids"] = gids;
  result["gid_index"] = nic.gid_index;
  result["nearest_gpus"] = nic.nearest_gpus;
  result["members"] = nic.members;
  result["master"] = nic.master;
  result["parent"] = nic.parent;
  result["vlan_id"] = nic.vlan_id;
  result["physical_function"] = nic.physical_function;
  return result;
}

template <typename Enum>
Enum named(const std::string& name, Enum last) {
  for (int i = 0; i <= static_cast<int>(last); ++i)
    if (const auto one = static_cast<Enum>(i); name == to_string(one)) return one;
  throw holmes::UsageError("'" + name + "' is no class or kind of a Nic; unpickle what this version has pickled");
}

holmes::IpAddress to_address(const std::string& text) {
  const std::size_t slash = text.rfind('/');
  if (slash == std::string::npos) throw holmes::UsageError("'" + text + "' is no address with its prefix's length");
  return {.address = text.substr(0, slash), .prefix_length = std::stoi(text.substr(slash + 1))};
}

// As to_dict gives it.
Nic from_dict(const py::dict& fields) {
  Nic nic;
  const auto read = [&]<typename Field>(const char* name, Field& field) { field = fields[name].cast<Field>(); };
  read("name", nic.name);
  nic.nic_class = named(fields["nic_class"].cast<std::string>(), holmes::NicClass::loopback);
  nic.kind = named(fields["kind"].cast<std::string>(), holmes::NicKind::loopback);
  read("netdev", nic.netdev);
  read("hca", nic.hca);
  read("port", nic.port);
  read("link_layer", nic.link_layer);
  read("state", nic.state);
  read("is_up", nic.is_up);
  read("is_netdev_up", nic.is_netdev_up);
  for (const py::handle& address : fields["addresses"])
    nic.addresses.push_back(to_address(address.cast<std::string>()));
  read("has_gateway", nic.has_gateway);
  read("speed_gbps", nic.speed_gbps);
  read("mtu", nic.mtu);
  read("numa_node", nic.numa_node);
  read("pci_address", nic.pci_address);
  read("pci_path", nic.pci_path);
  for (const py::handle& gid : fields["gids"])
    nic.gids.push_back({.index = gid["index"].cast<int>(),
                        .gid = gid["gid"].cast<std::string>(),
                        .type = gid["type"].cast<std::string>(),
                        .netdev = gid["netdev"].cast<std::string>()});
  read("gid_index", nic.gid_index);
  read("nearest_gpus", nic.nearest_gpus);
  read("members", nic.members);
  read("master", nic.master);
  read("parent", nic.parent);
  read("vlan_id", nic.vlan_id);
  read("physical_function", nic.physical_function);
  return nic;
}

std::string repr(const Nic& nic) {
  std::string text = "<Nic " + nic.name + ": " + to_string(nic.nic_class);
  if (!nic.hca.empty() && nic.port_name() != nic.name) text += " " + nic.port_name();
  text += ", " + nic.state;
  for (const auto& address : address_texts(nic)) text += ", " + address;
  return text + ">";
}

}  // namespace

void bind_discover(py::module_& m) {
  py::class_<Nic>(m, "Nic",
                  "One way out of this host: a network interface with the RDMA port below it, or a port without an "
                  "interface. Immutable data, equal where all of it is; absent values are None or empty.")
      .def_readonly("name", &Nic::name, "The interface ('ib0', 'eth1'); of an RDMA port without one 'mlx5_0:1'.")
      .def_property_readonly(
          "nic_class", [](const Nic& nic) { return std::string(to_string(nic.nic_class)); },
          "'infiniband', 'roce_v2', 'roce_v1', 'ethernet' or 'loopback'.")
      .def_property_readonly(
          "kind", [](const Nic& nic) { return std::string(to_string(nic.kind)); },
          "'physical', 'virtual_function', 'bond', 'vlan', 'bridge', 'virtual', 'wireless', 'ipoib' or 'loopback'.")
      .def_readonly("netdev", &Nic::netdev, "Network interface; empty if none.")
      .def_readonly("hca", &Nic::hca, "RDMA device; empty if none.")
      .def_readonly("port", &Nic::port, "Port of the RDMA device.")
      .def_property_readonly("port_name", &Nic::port_name, "'mlx5_0:1'; empty without an RDMA port.")
      .def_readonly("link_layer", &Nic::link_layer, "'InfiniBand', 'Ethernet' or 'Loopback'.")
      .def_readonly("state", &Nic::state, "Of the RDMA port ('active', 'down', 'init'), else of the interface.")
      .def_readonly("is_up", &Nic::is_up, "The RDMA port is active; without one, the interface is up.")
      .def_readonly("is_netdev_up", &Nic::is_netdev_up, "The interface carries packets.")
      .def_property_readonly("addresses", &address_texts, "['10.0.0.1/24', ...]: IPv4 first, link-local last.")
      .def_property_readonly(
          "address",
          [](const Nic& nic) {
            return nic.addresses.empty() ? std::optional<std::string>() : nic.addresses.front().address;
          },
          "The address to bind, without prefix length: the first of `addresses`.")
      .def_readonly("has_gateway", &Nic::has_gateway, "A route through it uses a gateway.")
      .def_readonly("speed_gbps", &Nic::speed_gbps, "Line rate in Gbit/s.")
      .def_readonly("mtu", &Nic::mtu, "Largest packet in bytes.")
      .def_readonly("numa_node", &Nic::numa_node, "NUMA node; None where unknown or where members differ.")
      .def_readonly("pci_address", &Nic::pci_address, "'0000:16:00.0'; empty for software interfaces.")
      .def_readonly("pci_path", &Nic::pci_path, "Path of the device below the sysfs root.")
      .def_property_readonly(
          "gids", [](const Nic& nic) { return py::list(to_dict(nic)["gids"]); },
          "GID table of this interface: dicts of index, gid, type, netdev.")
      .def_readonly("gid_index", &Nic::gid_index, "Index of the GID to use.")
      .def_readonly("nearest_gpus", &Nic::nearest_gpus, "PCI addresses of the GPUs at the smallest PCI distance.")
      .def_readonly("members", &Nic::members, "Members of a bond or bridge.")
      .def_readonly("master", &Nic::master, "The bond or bridge it belongs to.")
      .def_readonly("parent", &Nic::parent, "Parent of a VLAN or an IPoIB child.")
      .def_readonly("vlan_id", &Nic::vlan_id, "VLAN id.")
      .def_readonly("physical_function", &Nic::physical_function,
                    "PCI address of a virtual function's parent, if shown.")
      .def("with_address", &Nic::with_address, py::arg("address"),
           "A copy whose first address is `address` (without prefix length). Raises UsageError if it has no such one.")
      .def("to_dict", &to_dict, "All attributes as plain data, ready for JSON.")
      .def(
          "__eq__",
          [](const Nic& self, const py::object& other) {
            return py::isinstance<Nic>(other) && self == other.cast<const Nic&>();
          },
          py::arg("other"))
      .def("__hash__", [](const Nic& self) { return std::hash<std::string>()(repr(self)); })
      .def(py::pickle(&to_dict, &from_dict))
      .def("__repr__", &repr);
  m.def("host_name", &holmes::host_name, "HOLMES_HOSTNAME, else the system's host name. Local.");
  m.def("host_identity", &holmes::host_identity,
        "Equal on processes that share a kernel and a network namespace, and so a loopback. Local.");
  m.def("rdma_mtu", &holmes::rdma_mtu_bytes, py::arg("port"),
        "Bytes that an RDMA port ('mlx5_0:1') sends in a packet, as its HCA tells by verbs. Local. Raises NicError, "
        "SystemError where it cannot be asked.");
  py::class_<holmes::RdmaDevice, std::shared_ptr<holmes::RdmaDevice>>(
      m, "RdmaPort", "An RDMA port ('mlx5_0:1'), open. Local. Raises NicError, SystemError where it cannot be used.")
      .def(py::init(
               [](const std::string& port) { return std::make_shared<holmes::RdmaDevice>(port, holmes::Env::read()); }),
           py::arg("port"))
      .def_property_readonly("fabric", &holmes::RdmaDevice::fabric,
                             "What ports must have in common to talk: 'InfiniBand', 'RoCE v2', ...")
      .def_property_readonly("gid_index", &holmes::RdmaDevice::gid_index, "Entry of its GID table that it uses.")
      .def_property_readonly(
          "max_message_bytes", [](const holmes::RdmaDevice& port) { return port.attributes().max_message_bytes; },
          "The longest message that it carries.")
      .def(
          "check_room",
          [](const std::shared_ptr<holmes::RdmaDevice>& port) {
            const holmes::RdmaProbe probe(port, holmes::RdmaRings::bytes_for(2));
          },
          "Raises SystemError where this process may not lock what a communicator's connection needs.");
  py::class_<holmes::RdmaProbe>(m, "RdmaProbe",
                                "One end of a trial whether two ports reach each other, and what they carry. Raises "
                                "SystemError where the HCA or the limit of locked memory has no room for it.")
      .def(py::init([](const std::shared_ptr<holmes::RdmaDevice>& port, std::size_t ring_bytes) {
             return std::make_unique<holmes::RdmaProbe>(port, ring_bytes);
           }),
           py::arg("port"), py::arg("ring_bytes") = 4096,
           "`ring_bytes`: of each write of `carries`, a power of two, the same on both ends.")
      .def_property_readonly(
          "endpoint", [](const holmes::RdmaProbe& probe) { return py::bytes(probe.endpoint()); },
          "What the other end connects to.")
      .def(
          "connect",
          [](holmes::RdmaProbe& probe, const py::bytes& peer) {
            const std::string endpoint = peer;
            const holmes::GilRelease no_gil;
            probe.connect(endpoint);
          },
          py::arg("peer"), "To the other end's `endpoint`. Raises NicError where the HCA knows no way to it.")
      .def(
          "reaches",
          [](holmes::RdmaProbe& probe, double timeout_s) {
            const holmes::GilRelease no_gil;
            return probe.reaches(seconds(timeout_s));
          },
          py::arg("timeout_s"),
          "Whether the other end's HCA acknowledges a write within the time; that end must be connected, and its "
          "process "
          "has nothing to do.")
      .def(
          "meets",
          [](holmes::RdmaProbe& probe, double timeout_s) {
            const holmes::GilRelease no_gil;
            return probe.meets(seconds(timeout_s));
          },
          py::arg("timeout_s"), "Whether the other end's process calls this too within the time.")
      .def(
          "carries",
          [](holmes::RdmaProbe& probe, double warm_s, double count_s) {
            const holmes::GilRelease no_gil;
            return probe.carries(seconds(warm_s), seconds(count_s));
          },
          py::arg("warm_s"), py::arg("count_s"),
          "Bytes a second that the other end's HCA acknowledges, for `count_s` after `warm_s`; 0 where it stops doing "
          "so.");
  m.def(
      "discover_gpus",
      [](const std::optional<std::string>& sysfs_root) {
        py::list gpus;
        for (const auto& gpu : holmes::find_gpus(holmes::Sysfs(sysfs_root.value_or(holmes::default_sysfs_root()))))
          gpus.append(py::dict("pci_address"_a = gpu.address, "pci_path"_a = gpu.path, "numa_node"_a = gpu.numa_node));
        return gpus;
      },
      py::arg("sysfs_root") = py::none(),
      "NVIDIA and AMD GPUs on this host's PCI bus, by address: dicts of pci_address, pci_path and numa_node (None "
      "where "
      "unknown). Local.");
  m.def(
      "discover_nics",
      [](const std::optional<std::string>& sysfs_root) {
        const std::string root = sysfs_root.value_or(holmes::default_sysfs_root());
        const holmes::GilRelease no_gil;
        return holmes::discover_nics(root);
      },
      py::arg("sysfs_root") = py::none(),
      "All NICs of this host, by class and name. Local. `sysfs_root`: None means HOLMES_SYSFS_ROOT, else /sys. Raises "
      "UsageError where it is no folder.");
}
