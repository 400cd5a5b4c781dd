"""The description of a testbed: networks, clusters, nodes and their NICs, read from YAML.

    description: one line                     # optional
    kernel: uml                               # optional: each node is a kernel, its HCAs are Soft-RoCE (docs/rdma.md)
    congestion_control: reno                  # optional; without it, the kernel's default
    seed: 7                                   # optional; which packets are lost or late, see below
    networks:                                 # one bridge each; no route between them
      ib:  {class: infiniband, rate_gbps: 1}  # every link's rate, each direction (default: unlimited); mtu (default
      eth: {class: ethernet, rate_gbps: 0.1}  # 1500) and queue_ms (default 50: what a full link holds) are optional;
                                              # uplink: what a cluster has to the others (default: no limit);
                                              # ip: false: its NICs have no IP address (with kernel: uml)
      wan:                                    # (class: ethernet; any of these may be left out)
        class: ethernet
        rate_gbps: 1                          # what a NIC sends ...
        receive_gbps: 0.5                     # ... and receives, where that is another rate
        queue_bytes: 1000000                  # instead of queue_ms: what waits at a full link; more is lost
        delay_ms: 20                          # what is sent arrives so much later: a ping takes twice that
        jitter_ms: 2                          # the delay differs by up to this, evenly; packets keep their order
        loss_percent: 0.01                    # of the packets, as in `tc ... netem loss 0.01%`
        reorder_percent: 0.1                  # of the packets: not delayed, so ahead of those that are
        uplink: {rate_gbps: 1, delay_ms: 10}  # all of these keys; uplink_gbps: 1 is short for {rate_gbps: 1}
    clusters:
      a:
        nodes: 2                              # a0, a1; or names with overrides, as in b
        gpus_per_node: 8                      # optional, default 0: GPUs shown in the node's fake sysfs
        nics:
          - {name: ib0, network: ib, hca: mlx5_0}
          - {name: eth0, network: eth}
      b:
        nodes:
          b0: {}
          b1: {ib0: {name: ibp12s0, hca: mlx5_4}}   # any NIC field may differ on one node; with another class
        nics: [...]                                 # its sysfs says what the wire is not

A NIC takes class, mtu and what its link is like (rate_gbps to reorder_percent) from its network unless it states its
own. Which packets are lost or late follows from `seed` and the order in which they come. One network must join all
nodes. A
network with `addresses_of: ib` is another wire with addresses of ib's subnet, as where two sites chose the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

import yaml

from holmes.files import parse_yaml
from holmes_comm.errors import HolmesError, UsageError


class SpecError(UsageError):
    """The YAML description of a testbed is wrong; the message names the place, the rule and the fix."""


class TestbedError(HolmesError):
    """The testbed could not be built or has ended: a tool is missing, the kernel refuses, or its first process died."""

    __test__ = False  # not a test class, whatever its name says to pytest


#: NIC classes of a spec, as users write them.
NIC_CLASSES = ("infiniband", "roce_v2", "roce_v1", "ethernet")
#: What a node may be.
KERNELS = ("host", "uml")
_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_NIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,15}")
#: Of networks and clusters: they name links, in files of words and in change files.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: Names that mean something else to the kernel.
_NO_NIC_NAMES = ("lo", ".", "..", "all", "default")
_HCA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
#: What tc takes: a rate of a bit a second is none, and its bursts have 32 bits.
_MIN_GBPS, _MAX_GBPS = 1e-5, 10_000.0
_MAX_QUEUE_MS = 60_000.0
_MAX_NODES, _MAX_GPUS = 1024, 64
_MIN_MTU, _MAX_MTU = 576, 9000
_MAX_DELAY_MS = 10_000.0
_MAX_PERCENT = 99.0
#: Some of TCP's super-packets, or the first would fill the queue and the second be lost.
_MIN_QUEUE_BYTES = 65536
#: The kernel counts a queue's bytes with 32 bits.
MAX_QUEUE_BYTES = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a NIC's link, or a cluster's uplink, is like.

    `rate_gbps` limits what is sent, and what is received unless `receive_gbps` does (None: nothing does); `queue_bytes`
    or else `queue_ms` is what waits for a rate. `delay_ms`, `jitter_ms`, `loss_percent` and `reorder_percent` are of
    what is sent.
    """

    rate_gbps: float | None = None
    receive_gbps: float | None = None
    queue_ms: float = 50.0
    queue_bytes: int | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    reorder_percent: float = 0.0

    @property
    def receives_gbps(self) -> float | None:
        """The rate of what is received."""
        return self.rate_gbps if self.receive_gbps is None else self.receive_gbps

    @property
    def waits_ms(self) -> float:
        """How long what is received may wait for its rate."""
        if self.queue_bytes is None or self.receives_gbps is None:
            return self.queue_ms
        return self.queue_bytes * 8 / (self.receives_gbps * 1e6)

    @property
    def is_plain(self) -> bool:
        """Whether all that is sent arrives at once."""
        return not (self.delay_ms or self.loss_percent)


_LINK_KEYS = tuple(field.name for field in fields(Link))


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(Link):
    """One fabric: all NICs on it reach each other, and nothing else does. Its link is what its NICs have by default.

    `uplink` is what each cluster has to the others over it (None: no limit); `addresses_of` names the network whose
    subnet its addresses are of (None: its own).
    """

    name: str
    nic_class: str
    mtu: int = 1500
    uplink: Link | None = None
    addresses_of: str | None = None
    has_ip: bool = True


@dataclass(frozen=True, kw_only=True)
class Nic(Link):
    """One NIC of one node, and its link; `hca` is the RDMA device, if any. Without `has_ip` no node has its address."""

    name: str
    network: str
    nic_class: str
    mtu: int
    hca: str | None
    address: IPv4Interface
    has_ip: bool = True


@dataclass(frozen=True)
class Node:
    """One emulated machine."""

    name: str
    cluster: str
    nics: tuple[Nic, ...]
    gpus: int = 0

    def nic(self, name: str) -> Nic:
        """Returns the NIC of that name. Raises SpecError naming those there are."""
        for nic in self.nics:
            if nic.name == name:
                return nic
        raise SpecError(f"node {self.name} has no NIC {name!r}; it has {', '.join(nic.name for nic in self.nics)}")

    def nic_on(self, network: str) -> Nic | None:
        """Returns this node's first NIC on `network`, or None."""
        return next((nic for nic in self.nics if nic.network == network), None)


@dataclass(frozen=True)
class Cluster:
    """Nodes that share a description; the name is for people, discovery never sees it."""

    name: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Spec:
    """A whole testbed. `common_network` joins all nodes: what a user of stock tools would have to fall back to.

    `kernel`: "host", nodes are namespaces of this machine's kernel; or "uml", each is a user-mode Linux (docs/rdma.md).
    """

    name: str
    description: str
    networks: Mapping[str, NetworkSpec]
    clusters: tuple[Cluster, ...]
    common_network: str
    congestion_control: str | None = None
    seed: int = 0
    kernel: str = "host"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, cluster by cluster."""
        return tuple(node for cluster in self.clusters for node in cluster.nodes)

    def node(self, name: str) -> Node:
        """Returns the node of that name. Raises SpecError naming those there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise SpecError(f"testbed {self.name} has no node {name!r}; it has {', '.join(n.name for n in self.nodes)}")


def builtin_specs() -> list[str]:
    """Returns the names of the specs that come with Holmes."""
    folder = resources.files("holmes.lab.testbed").joinpath("specs")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_spec(name_or_path: str | Path) -> Spec:
    """Reads a spec: the name of a built-in one, or the path of a YAML file.

    Raises SpecError where there is none, or where it breaks a rule.
    """
    text_name = str(name_or_path)
    if text_name in builtin_specs():
        text = resources.files("holmes.lab.testbed").joinpath(f"specs/{text_name}.yaml").read_text(encoding="utf-8")
    elif Path(name_or_path).is_file():
        text_name = Path(name_or_path).stem
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SpecError(f"{name_or_path} is not valid YAML: {error}") from error
    else:
        raise SpecError(
            f"no testbed spec {text_name!r}: neither a file nor one of the built-in {', '.join(builtin_specs())}"
        )
    try:
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{name_or_path} is not valid YAML: {error}") from error
    try:
        return parse_spec(text_name, data)
    except SpecError as error:
        raise SpecError(f"{name_or_path}: {error}") from error


def parse_spec(name: str, data: Any) -> Spec:
    """Builds a Spec from parsed YAML (see the module's docstring). Raises SpecError where a rule is broken."""
    top = _mapping(data, "the spec")
    _known(top, "the spec", ("description", "kernel", "congestion_control", "seed", "networks", "clusters"))
    kernel = top.get("kernel", "host")
    if kernel not in KERNELS:
        raise SpecError(f"kernel is {kernel!r}; it must be one of {', '.join(KERNELS)}")
    networks = {
        _name(key, "networks"): _network(str(key), _mapping(value, f"networks.{key}"))
        for key, value in _mapping(top.get("networks"), "networks").items()
    }
    for net in networks.values():
        owner = networks.get(net.addresses_of or net.name)
        if owner is None or (owner is not net and owner.addresses_of):
            raise SpecError(
                f"networks.{net.name}.addresses_of is {net.addresses_of!r}; it must name a network with addresses of "
                f"its own: {', '.join(other.name for other in networks.values() if not other.addresses_of)}"
            )
    hosts: dict[str, int] = dict.fromkeys(networks, 0)  # addresses handed out so far, per network
    clusters = tuple(
        _cluster(_name(key, "clusters"), _mapping(value, f"clusters.{key}"), networks, hosts)
        for key, value in _mapping(top.get("clusters"), "clusters").items()
    )
    nodes = [node for cluster in clusters for node in cluster.nodes]
    if not nodes:
        raise SpecError("clusters is empty; give it one at least (`holmes testbed show --yaml` prints an example)")
    _unique((node.name for node in nodes), "node name", "clusters")
    _check_kernel(kernel, networks.values(), nodes)
    common = [net for net in networks.values() if net.has_ip and all(node.nic_on(net.name) for node in nodes)]
    if not common:
        raise SpecError("no network joins all nodes; give every node a NIC on one network (a slow one will do)")
    common.sort(key=lambda net: net.nic_class != "ethernet")  # stable: Ethernet first, then as written
    congestion_control = top.get("congestion_control")
    return Spec(
        name=name,
        description=str(top.get("description", "")),
        networks=networks,
        clusters=clusters,
        common_network=common[0].name,
        congestion_control=None if congestion_control is None else str(congestion_control),
        seed=_seed(top.get("seed", 0)),
        kernel=kernel,
    )


def _check_kernel(kernel: str, networks: Iterable[NetworkSpec], nodes: Iterable[Node]) -> None:
    """What only one kind of node can be."""
    bare = next((network.name for network in networks if not network.has_ip), None)
    if kernel == "host" and bare is not None:
        raise SpecError(f"networks.{bare}.ip is false, but without IP only verbs reach a NIC; give kernel: uml")
    for node in nodes:
        for nic in node.nics:
            if kernel == "uml" and nic.nic_class not in ("roce_v2", "ethernet"):
                raise SpecError(f"{node.name}.{nic.name} is {nic.nic_class}, but Soft-RoCE (kernel: uml) is roce_v2")


def _network(name: str, data: Mapping[str, Any]) -> NetworkSpec:
    where = f"networks.{name}"
    _known(data, where, ("class", "ip", "mtu", "uplink", "uplink_gbps", "addresses_of", *_LINK_KEYS))
    has_ip = data.get("ip", True)
    if not isinstance(has_ip, bool):
        raise SpecError(f"{where}.ip is {has_ip!r}; it must be true or false")
    addresses_of = data.get("addresses_of")
    link = _link(data, where, Link())
    return NetworkSpec(
        name=name,
        nic_class=_nic_class(data.get("class"), where),
        mtu=_mtu(data.get("mtu", 1500), where),
        uplink=_uplink(data, where, link),
        **asdict(link),
        addresses_of=None if addresses_of is None else str(addresses_of),
        has_ip=has_ip,
    )


def _cluster(name: str, data: Mapping[str, Any], networks: Mapping[str, NetworkSpec], hosts: dict[str, int]) -> Cluster:
    where = f"clusters.{name}"
    _known(data, where, ("nodes", "gpus_per_node", "nics"))
    nodes_data = data.get("nodes")
    if isinstance(nodes_data, int) and not isinstance(nodes_data, bool) and nodes_data > 0:
        if nodes_data > _MAX_NODES:
            raise SpecError(f"{where}.nodes is {nodes_data}; it must be a number from 1 to {_MAX_NODES}")
        overrides: dict[str, Any] = {f"{name}{index}": {} for index in range(nodes_data)}
    else:
        overrides = {str(key): value for key, value in _mapping(nodes_data, f"{where}.nodes").items()}
    gpus = data.get("gpus_per_node", 0)
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 0 <= gpus <= _MAX_GPUS:
        raise SpecError(f"{where}.gpus_per_node is {gpus!r}; it must be an integer from 0 to {_MAX_GPUS}")
    nics_data = data.get("nics")
    if not isinstance(nics_data, list) or not nics_data:
        raise SpecError(f"{where}.nics is {nics_data!r}; it must be a list such as [{{name: eth0, network: eth}}]")
    entries = [_mapping(entry, f"{where}.nics[{index}]") for index, entry in enumerate(nics_data)]
    names = [str(entry.get("name")) for entry in entries]
    nodes = []
    for node_name, changes in overrides.items():
        node_where = f"{where}.nodes.{node_name}"
        if not _NODE_NAME.fullmatch(node_name):
            raise SpecError(f"{node_where}: a node's name is a host name: a-z, 0-9 and '-', at most 32 characters")
        changes = _mapping(changes or {}, node_where) if changes else {}
        _known(changes, node_where, names)
        nics = tuple(
            _nic({**entry, **_mapping(changes.get(nic, {}), f"{node_where}.{nic}")}, node_where, networks, hosts)
            for nic, entry in zip(names, entries, strict=True)
        )
        _unique((nic.name for nic in nics), "NIC name", node_where)
        _unique((nic.hca for nic in nics if nic.hca), "HCA name", node_where)
        nodes.append(Node(node_name, name, nics, gpus))
    return Cluster(name, tuple(nodes))


def _nic(data: Mapping[str, Any], where: str, networks: Mapping[str, NetworkSpec], hosts: dict[str, int]) -> Nic:
    _known(data, where, ("name", "network", "class", "hca", "mtu", *_LINK_KEYS))
    name = str(data.get("name", ""))
    where = f"{where}.{name}"
    if not isinstance(data.get("name"), str) or not _NIC_NAME.fullmatch(name) or name in _NO_NIC_NAMES:
        raise SpecError(
            f"{where}: a NIC's name is text of 1 to 15 characters of A-Z, a-z, 0-9, '_', '.', '-', and none of "
            f"{', '.join(_NO_NIC_NAMES)}"
        )
    network = networks.get(str(data.get("network")))
    if network is None:
        raise SpecError(f"{where}.network is {data.get('network')!r}; networks are {', '.join(networks)}")
    nic_class = _nic_class(data.get("class", network.nic_class), where)
    hca = data.get("hca")
    if nic_class != "ethernet" and not hca:
        raise SpecError(f"{where} is {nic_class} and needs an hca, for example mlx5_0")
    if hca is not None and not (isinstance(hca, str) and _HCA_NAME.fullmatch(hca)):
        raise SpecError(
            f"{where}.hca is {hca!r}; it must be text of 1 to 63 characters of A-Z, a-z, 0-9, '_', '.', '-', for "
            "example mlx5_0"
        )
    owner = network.addresses_of or network.name
    hosts[owner] += 1
    host = hosts[owner]
    prefix = 10 + list(networks).index(owner)
    if prefix > 255 or host >= 65535:
        raise SpecError(f"{where}: at most 245 networks with 65534 NICs each fit the testbed's 10.0.0.0/8")
    return Nic(
        name=name,
        network=network.name,
        nic_class=nic_class,
        mtu=_mtu(data.get("mtu", network.mtu), where),
        **asdict(_link(data, where, network)),
        hca=hca,
        address=IPv4Interface(f"10.{prefix}.{host // 256}.{host % 256}/16"),
        has_ip=network.has_ip,
    )


def _link(data: Mapping[str, Any], where: str, default: Link) -> Link:
    """Of the keys of `data` that are a link's; what it does not state is as in `default`."""
    if "queue_ms" in data and "queue_bytes" in data:
        raise SpecError(f"{where} has both queue_ms and queue_bytes; keep one of them")
    stated = {key: data.get(key, getattr(default, key)) for key in _LINK_KEYS}
    if "queue_ms" in data:
        stated["queue_bytes"] = None
    link = Link(
        rate_gbps=_rate(stated["rate_gbps"], f"{where}.rate_gbps"),
        receive_gbps=_rate(stated["receive_gbps"], f"{where}.receive_gbps"),
        queue_ms=_up_to(_MAX_QUEUE_MS, _positive(stated["queue_ms"], f"{where}.queue_ms"), f"{where}.queue_ms"),
        queue_bytes=_queue_bytes(stated["queue_bytes"], f"{where}.queue_bytes"),
        delay_ms=_up_to(_MAX_DELAY_MS, stated["delay_ms"], f"{where}.delay_ms"),
        jitter_ms=_up_to(_MAX_DELAY_MS, stated["jitter_ms"], f"{where}.jitter_ms"),
        loss_percent=_up_to(_MAX_PERCENT, stated["loss_percent"], f"{where}.loss_percent"),
        reorder_percent=_up_to(_MAX_PERCENT, stated["reorder_percent"], f"{where}.reorder_percent"),
    )
    if link.queue_bytes and not link.rate_gbps and not link.receive_gbps:
        raise SpecError(f"{where}.queue_bytes is {link.queue_bytes}, but nothing waits without a rate; give rate_gbps")
    if link.jitter_ms > link.delay_ms:
        raise SpecError(
            f"{where}.jitter_ms is {link.jitter_ms:g}, more than delay_ms ({link.delay_ms:g}): a packet would arrive "
            "before it is sent; make delay_ms larger"
        )
    if link.reorder_percent and not link.delay_ms:
        raise SpecError(
            f"{where}.reorder_percent is {link.reorder_percent:g}, but without a delay no packet waits for others to "
            "overtake it; give delay_ms"
        )
    return link


def changed_link(link: Link, changes: Mapping[str, Any], where: str) -> Link:
    """Returns the link after a change of some of a spec's keys. Raises SpecError where it breaks a rule of specs."""
    _known(changes, where, _LINK_KEYS)
    after = _link(changes, where, link)
    for key in ("rate_gbps", "receive_gbps"):
        if getattr(after, key) is None and getattr(link, key) is not None:
            raise SpecError(f"{where}.{key} is None; a limit cannot go while the link is used, give it a high rate")
    return after


def _uplink(data: Mapping[str, Any], where: str, own: Link) -> Link | None:
    if "uplink_gbps" in data and "uplink" in data:
        raise SpecError(f"{where} has both uplink and uplink_gbps; write the rate as uplink.rate_gbps")
    default = Link(queue_ms=own.queue_ms)
    if "uplink" not in data:
        rate_gbps = _rate(data.get("uplink_gbps"), f"{where}.uplink_gbps")
        return None if rate_gbps is None else replace(default, rate_gbps=rate_gbps)
    stated = _mapping(data["uplink"], f"{where}.uplink")
    _known(stated, f"{where}.uplink", _LINK_KEYS)
    return _link(stated, f"{where}.uplink", default)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{where} is {value!r}; it must be a mapping (`holmes testbed show --yaml` prints an example)")
    return value


def _name(key: Any, where: str) -> str:
    if not _NAME.fullmatch(str(key)):
        raise SpecError(
            f"{where} has the name {str(key)!r}; it must be 1 to 64 characters of A-Z, a-z, 0-9, '_', '.', '-'"
        )
    return str(key)


def _known(data: Mapping[str, Any], where: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    for key in data:
        if key not in allowed:
            raise SpecError(f"{where} has an unknown key {key!r}; allowed are {', '.join(allowed)}")


def _unique(names: Iterable[str], what: str, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{where}: {what} {name!r} is used twice; give each its own")
        seen.add(name)


def _nic_class(value: Any, where: str) -> str:
    if value not in NIC_CLASSES:
        raise SpecError(f"{where}.class is {value!r}; it must be one of {', '.join(NIC_CLASSES)}")
    return str(value)


def _positive(value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise SpecError(f"{where} is {value!r}; it must be a number above 0")
    return value  # not a float yet: an integer may be beyond them


def _rate(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not _MIN_GBPS <= _positive(value, where) <= _MAX_GBPS:
        raise SpecError(f"{where} is {value!r}; it must be a number from {_MIN_GBPS:g} to {_MAX_GBPS:g}")
    return float(value)


def _up_to(most: float, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise SpecError(f"{where} is {value!r}; it must be a number from 0 to {most:g}")
    return float(value)


def _queue_bytes(value: Any, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not _MIN_QUEUE_BYTES <= value <= MAX_QUEUE_BYTES:
        raise SpecError(f"{where} is {value!r}; it must be an integer from {_MIN_QUEUE_BYTES} to {MAX_QUEUE_BYTES}")
    return value


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise SpecError(f"seed is {value!r}; it must be an integer from 0 to {2**32 - 1}")
    return value


def _mtu(value: Any, where: str) -> int:
    if not isinstance(value, int) or not _MIN_MTU <= value <= _MAX_MTU:
        raise SpecError(f"{where}.mtu is {value!r}; it must be an integer from {_MIN_MTU} to {_MAX_MTU}")
    return value
