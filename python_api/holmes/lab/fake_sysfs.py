"""Writes the sysfs tree of a described machine: test fixtures, and the nodes of the emulated testbed."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_CLASSES = ("infiniband", "roce", "roce_v1", "roce_v2", "ethernet", "loopback")
_KINDS = ("physical", "virtual_function", "bond", "vlan", "bridge", "virtual", "wireless", "ipoib", "loopback")
_HARDWARE_TYPE = {"infiniband": 32, "loopback": 772}  # ARPHRD_*; everything else is Ethernet, 1
_DEVTYPE = {"vlan": "vlan", "bond": "bond", "bridge": "bridge", "wireless": "wlan"}
_GPU_VENDOR = {"nvidia": ("0x10de", "0x030200"), "amd": ("0x1002", "0x038000")}
_PORT_STATE = {"up": "4: ACTIVE", "down": "1: DOWN", "init": "2: INIT", "armed": "3: ARMED"}
_GID_ENTRIES = 16
_ZERO_GID = ":".join(["0000"] * 8)


@dataclass(frozen=True)
class InterfaceSpec:
    """One interface and, where it has one, its RDMA port.

    name: network interface ("ib0", "eth1"); "" for an RDMA port without one.
    nic_class: "infiniband", "roce_v1", "roce_v2" ("roce" is the same), "ethernet" or "loopback".
    kind: "physical", "virtual_function", "bond", "vlan", "bridge", "virtual", "wireless", "ipoib" or "loopback".
    hca, port: RDMA device and port, "mlx5_0" and 1. A VLAN on a RoCE NIC names the HCA of its parent.
    speed_gbps, mtu, numa: line rate in Gbit/s, bytes, NUMA node; None leaves them unknown (mtu: the class's default).
    pci: path from the host bridge ("pci0000:15/0000:15:01.0/0000:16:00.0") or just the address. A physical interface
    without one gets an address of its own.
    state: "up" or "down"; an RDMA port may also be "init" or "armed".
    addresses: "10.0.0.1/24", "fd00::1/64".
    gateway: a gateway is reached through this interface.
    members: of a bond or a bridge. vlan_id, parent: of a VLAN; parent also of an IPoIB child.
    physfn: PCI address of the physical function, where the machine shows it. vendor, device: PCI ids ("0x15b3").
    driver: the kernel's; the ports of an "efa" are of no link layer.
    """

    name: str
    nic_class: str = "ethernet"
    kind: str = "physical"
    hca: str = ""
    port: int = 1
    speed_gbps: float | None = None
    mtu: int | None = None
    numa: int | None = None
    pci: str = ""
    state: str = "up"
    addresses: tuple[str, ...] = ()
    gateway: bool = False
    members: tuple[str, ...] = ()
    vlan_id: int | None = None
    parent: str = ""
    physfn: str = ""
    driver: str = ""
    vendor: str = "0x15b3"
    device: str = "0x101b"


@dataclass(frozen=True)
class GpuSpec:
    """One GPU: PCI path (as InterfaceSpec.pci), NUMA node (None: unknown), vendor "nvidia" or "amd"."""

    pci: str
    numa: int | None = None
    vendor: str = "nvidia"


@dataclass(frozen=True)
class MachineSpec:
    """The NICs and GPUs of one machine. A loopback interface is added where none is described."""

    interfaces: tuple[InterfaceSpec, ...] = ()
    gpus: tuple[GpuSpec, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MachineSpec:
        """Reads {"interfaces": [{...InterfaceSpec}], "gpus": [{...GpuSpec}]}, as YAML or JSON gives it.

        Raises ValueError on a key that no field has.
        """
        return cls(
            tuple(_from_dict(InterfaceSpec, entry) for entry in data.get("interfaces", ())),
            tuple(_from_dict(GpuSpec, entry) for entry in data.get("gpus", ())),
        )


def _from_dict(cls: type[Any], entry: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})


def _require(what: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} {value!r}; use one of {', '.join(allowed)}")


def write_sysfs(
    root: str | os.PathLike[str], machine: MachineSpec | Mapping[str, Any], *, with_addresses: bool = True
) -> Path:
    """Writes a sysfs tree that describes `machine` under `root` and returns `root`. Local; no privileges needed.

    Point HOLMES_SYSFS_ROOT, or discover_nics(sysfs_root), at it. `machine` is a MachineSpec or the equivalent dict:

        write_sysfs(root, {"interfaces": [
            {"name": "ib0", "nic_class": "infiniband", "hca": "mlx5_0", "speed_gbps": 1, "numa": 0,
             "pci": "pci0000:15/0000:15:01.0/0000:16:00.0", "addresses": ["10.1.0.1/24"]},
            {"name": "eth0", "speed_gbps": 0.1, "addresses": ["10.0.0.1/24"], "gateway": True}]})

    With with_addresses=True the tree is a whole machine: a file `addresses` holds the addresses, `proc/net/route` the
    gateways, and the kernel is never asked. With False (emulated nodes) addresses, link states and routes come from the
    running kernel's network namespace, and `addresses` here only shape the RoCE GID table; interfaces of the tree that
    the kernel does not have are not reported.
    Raises ValueError on a wrong description.
    """
    spec = machine if isinstance(machine, MachineSpec) else MachineSpec.from_dict(machine)
    tree = _Tree(Path(root), spec)
    tree.write()
    if with_addresses:
        tree.write_addresses()
    return tree.root


class _Tree:
    def __init__(self, root: Path, spec: MachineSpec) -> None:
        self.root = root
        interfaces = list(spec.interfaces)
        if not any(i.nic_class == "loopback" or i.name == "lo" for i in interfaces):
            interfaces.append(InterfaceSpec("lo", "loopback", "loopback", addresses=("127.0.0.1/8", "::1/128")))
        self.interfaces = interfaces
        self.gpus = spec.gpus
        self.by_name = {i.name: i for i in interfaces if i.name}
        if len(self.by_name) < sum(1 for i in interfaces if i.name):
            raise ValueError(f"two interfaces have one name: {', '.join(i.name for i in interfaces)}")
        for i in interfaces:
            _require(f"interface {i.name!r} has class", i.nic_class, _CLASSES)
            _require(f"interface {i.name!r} has kind", i.kind, _KINDS)
            _require(f"interface {i.name!r} has state", i.state, _PORT_STATE if i.hca else ("up", "down"))
            for other in (*i.members, *([i.parent] if i.parent else [])):
                if other not in self.by_name:
                    raise ValueError(f"interface {i.name!r} names {other!r}, which the machine does not have")
        self.device_dirs = {i.name or f"{i.hca}:{i.port}": self._device_dir(n, i) for n, i in enumerate(interfaces)}

    def write(self) -> None:
        for gpu in self.gpus:
            _require(f"GPU {gpu.pci} has vendor", gpu.vendor, _GPU_VENDOR)
            vendor, pci_class = _GPU_VENDOR[gpu.vendor]
            self._pci_device(_pci_dir(gpu.pci), pci_class, vendor, "0x2330", gpu.numa)
        for index, interface in enumerate(self.interfaces, start=1):
            device = self.device_dirs[interface.name or f"{interface.hca}:{interface.port}"]
            if device and interface.kind != "ipoib":
                self._nic_device(device, interface)
            if interface.name:
                self._netdev(index, interface)
        for hca in sorted({i.hca for i in self.interfaces if i.hca}):
            self._hca(hca)
        vlans = [i for i in self.interfaces if i.vlan_id is not None]
        if vlans:
            lines = [f"{i.name} | {i.vlan_id} | {i.parent}" for i in vlans]
            self._file(
                "proc/net/vlan/config", "VLAN Dev name | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW\n" + "\n".join(lines)
            )

    def write_addresses(self) -> None:
        lines = [f"{i.name} {address}" for i in self.interfaces for address in i.addresses]
        self._file("addresses", "\n".join(lines))
        routes = [
            f"{i.name}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0" for i in self.interfaces if i.gateway
        ]
        self._file("proc/net/route", "\n".join(["Iface\tDestination\tGateway\tFlags", *routes]))

    def _device_dir(self, index: int, interface: InterfaceSpec) -> str:
        """Folder of the device under root; "" for an interface that is software only."""
        if interface.kind == "ipoib" and interface.parent:
            parent = self.by_name[interface.parent]
            return self._device_dir(self.interfaces.index(parent), parent)
        if interface.kind in ("physical", "virtual_function", "wireless") or interface.pci:
            return _pci_dir(interface.pci or f"pci{index + 1:04x}:00/{index + 1:04x}:00:00.0")
        return ""

    def _hca_dir(self, hca: str) -> tuple[str, list[InterfaceSpec]]:
        """Device folder of an HCA (its own, or a bond's first member's) and the interfaces on it."""
        users = [i for i in self.interfaces if i.hca == hca]
        for user in users:
            names = [user.name or f"{user.hca}:{user.port}", *user.members]
            for name in names:
                if self.device_dirs[name]:
                    return self.device_dirs[name], users
        raise ValueError(f"HCA {hca!r} is on no physical interface")

    def _nic_device(self, device: str, interface: InterfaceSpec) -> None:
        pci_class = "0x020700" if interface.nic_class == "infiniband" else "0x020000"
        self._pci_device(device, pci_class, interface.vendor, interface.device, interface.numa)
        if interface.physfn:
            self._link(f"{device}/physfn", f"bus/pci/devices/{interface.physfn}")
        if interface.driver:
            self._file(f"bus/pci/drivers/{interface.driver}/uevent", "")
            self._link(f"{device}/driver", f"bus/pci/drivers/{interface.driver}")

    def _pci_device(self, device: str, pci_class: str, vendor: str, device_id: str, numa: int | None) -> None:
        self._file(f"{device}/class", pci_class)
        self._file(f"{device}/vendor", vendor)
        self._file(f"{device}/device", device_id)
        self._file(f"{device}/numa_node", -1 if numa is None else numa)
        self._link(f"bus/pci/devices/{device.rsplit('/', 1)[1]}", device)

    def _netdev(self, index: int, interface: InterfaceSpec) -> None:
        device = self.device_dirs[interface.name]
        folder = f"{device or 'devices/virtual'}/net/{interface.name}"
        loopback = interface.nic_class == "loopback"
        hardware_type = _HARDWARE_TYPE.get(interface.nic_class, 1)
        mtu = interface.mtu or {"infiniband": 2044, "loopback": 65536}.get(interface.nic_class, 1500)
        up = interface.state == "up"
        speed = -1 if interface.speed_gbps is None else round(interface.speed_gbps * 1000)
        devtype = f"DEVTYPE={_DEVTYPE[interface.kind]}\n" if interface.kind in _DEVTYPE else ""
        files = {
            "type": hardware_type,
            "ifindex": index,
            "operstate": "unknown" if loopback and up else "up" if up else "down",
            "flags": "0x9" if loopback else "0x1003" if up else "0x1002",
            "mtu": mtu,
            "speed": speed,
            "dev_port": interface.port - 1 if interface.hca else 0,
            "uevent": f"{devtype}INTERFACE={interface.name}\nIFINDEX={index}",
        }
        for name, content in files.items():
            self._file(f"{folder}/{name}", content)
        self._link(f"class/net/{interface.name}", folder)
        if device:
            self._link(f"{folder}/device", device)
        if interface.kind == "bond":
            self._file(f"{folder}/bonding/slaves", " ".join(interface.members))
        if interface.kind == "bridge":
            self._file(f"{folder}/bridge/stp_state", 0)
        if interface.kind == "ipoib" and interface.parent:
            self._file(f"{folder}/parent", interface.parent)
        lowers = interface.members or ((interface.parent,) if interface.kind == "vlan" else ())
        for lower in lowers:
            self._link(f"{folder}/lower_{lower}", f"class/net/{lower}")
        for upper in self.interfaces:
            if interface.name in upper.members:
                self._link(f"{folder}/master", f"{self.device_dirs[upper.name] or 'devices/virtual'}/net/{upper.name}")

    def _hca(self, hca: str) -> None:
        device, users = self._hca_dir(hca)
        folder = f"{device}/infiniband/{hca}"
        self._file(f"{folder}/node_type", "1: CA")
        self._link(f"{folder}/device", device)
        self._link(f"class/infiniband/{hca}", folder)
        for port in sorted({i.port for i in users}):
            on_port = [i for i in users if i.port == port and i.kind != "ipoib"]
            self._port(f"{folder}/ports/{port}", on_port)

    def _port(self, folder: str, interfaces: list[InterfaceSpec]) -> None:
        base = interfaces[0]
        infiniband = base.nic_class == "infiniband"
        self._file(f"{folder}/state", _PORT_STATE[base.state])
        self._file(f"{folder}/phys_state", "5: LinkUp" if base.state == "up" else "3: Disabled")
        other = "Unspecified" if base.driver == "efa" else "Ethernet"
        self._file(f"{folder}/link_layer", "InfiniBand" if infiniband else other)
        if base.speed_gbps is not None:
            self._file(f"{folder}/rate", f"{base.speed_gbps:g} Gb/sec (4X)")
        entries = [("fe80:0000:0000:0000:" + _guid(base), "IB/RoCE v1", "")] if infiniband else _roce_gids(interfaces)
        for index in range(_GID_ENTRIES):
            gid, gid_type, netdev = entries[index] if index < len(entries) else (_ZERO_GID, "", "")
            self._file(f"{folder}/gids/{index}", gid)
            if gid_type:
                self._file(f"{folder}/gid_attrs/types/{index}", gid_type)
            if netdev:
                self._file(f"{folder}/gid_attrs/ndevs/{index}", netdev)

    def _file(self, path: str, content: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{content}\n")

    def _link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        # Kernel-like relative links; the parent may itself be reached through one, so resolve it first.
        link.symlink_to(os.path.relpath(self.root.resolve() / target, link.parent.resolve()))


def _pci_dir(pci: str) -> str:
    path = pci if pci.startswith("pci") else f"pci{pci[:7]}/{pci}"
    return f"devices/{path}"


def _guid(interface: InterfaceSpec) -> str:
    digest = hashlib.sha256(f"{interface.hca}:{interface.port}:{interface.name}".encode()).hexdigest()[:16]
    return ":".join(digest[i : i + 4] for i in range(0, 16, 4))


def _roce_gids(interfaces: list[InterfaceSpec]) -> list[tuple[str, str, str]]:
    """The table as the kernel fills it: per address of each interface a v1 and, where spoken, a v2 entry."""
    table = []
    for interface in interfaces:
        gids = ["fe80:0000:0000:0000:" + _guid(interface)]
        for text in interface.addresses:
            address = ipaddress.ip_interface(text).ip
            digits = (address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed).hex()
            gids.append(":".join(digits[i : i + 4] for i in range(0, 32, 4)))
        types = ["IB/RoCE v1"] if interface.nic_class == "roce_v1" else ["IB/RoCE v1", "RoCE v2"]
        table += [(gid, gid_type, interface.name) for gid in gids for gid_type in types]
    return table
