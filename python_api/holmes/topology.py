"""Topology: what all ranks see of their NICs, merged into hosts, fabrics and clusters. Needs PyYAML only.

Flow: every rank's `NodeInventory` -> `merge_hosts` -> `candidate_fabrics` -> (probe.py confirms) -> `find_clusters`.
Nobody types a label: a fabric is a NIC class and an IP subnet, a cluster is the hosts that share their best fabric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes import files

RDMA_CLASSES = ("infiniband", "roce_v2", "roce_v1")
ROUTED = "routed"  # in place of a subnet: several subnets joined by gateways


@dataclass(frozen=True)
class Port:
    """One usable NIC of a host: it is up and has an IP address. `speed_gbps` is None where the driver tells none.

    `nic_class` is "infiniband", "roce_v2", "roce_v1" or "ethernet"; `has_gateway`: a route through it uses a gateway.
    """

    name: str
    nic_class: str
    address: str
    subnet: str
    speed_gbps: float | None = None
    has_gateway: bool = False

    @property
    def is_rdma(self) -> bool:
        """InfiniBand or RoCE."""
        return self.nic_class in RDMA_CLASSES


@dataclass(frozen=True)
class NodeInventory:
    """What one rank contributes. `host_id` tells hosts, containers and network namespaces apart."""

    rank: int
    host: str
    host_id: str
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Host:
    """A host and the ranks that run on it, in ascending order."""

    name: str
    host_id: str
    ranks: tuple[int, ...]
    ports: tuple[Port, ...]


@dataclass(frozen=True)
class Fabric:
    """Hosts that reach each other through NICs of one class in one subnet.

    `ports` maps a host id to the NIC's name; `speed_gbps` is the slowest member's; `confirmed` tells whether
    connections were tried (probe.py) or only assumed.
    """

    name: str
    nic_class: str
    subnet: str
    speed_gbps: float | None
    ports: Mapping[str, str]
    confirmed: bool = False

    def joins(self, host_ids: Iterable[str]) -> bool:
        """True when every one of these hosts has a NIC in this fabric."""
        return all(host_id in self.ports for host_id in host_ids)

    def preference(self) -> tuple[bool, bool, float, int, str]:
        """Sort key, best first: RDMA, Ethernet, routed; then the faster, then the larger one."""
        return (
            self.subnet == ROUTED,
            self.nic_class not in RDMA_CLASSES,
            -(self.speed_gbps or 0.0),
            -len(self.ports),
            self.name,
        )


@dataclass(frozen=True)
class Cluster:
    """Hosts whose best common network is `fabric` (None: a host that shares no network with another one)."""

    name: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    fabric: str | None
    nic_class: str | None


@dataclass(frozen=True)
class Topology:
    """All hosts, the fabrics that join them, best first, and the clusters. Saved as YAML or JSON that may be edited."""

    hosts: tuple[Host, ...]
    fabrics: tuple[Fabric, ...]
    clusters: tuple[Cluster, ...]

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(len(host.ranks) for host in self.hosts)

    def host_of(self, rank: int) -> Host:
        """The host that runs `rank`. Raises ValueError naming the ranks there are."""
        for host in self.hosts:
            if rank in host.ranks:
                return host
        raise ValueError(f"rank {rank} is not in this topology; it has ranks 0 to {self.world_size - 1}")

    def shared_fabrics(self, ranks: Iterable[int]) -> tuple[Fabric, ...]:
        """The fabrics that join the hosts of all these ranks, best first."""
        host_ids = {self.host_of(rank).host_id for rank in ranks}
        return tuple(fabric for fabric in self.fabrics if fabric.joins(host_ids))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings. The clusters are left out: they follow from the rest."""
        return {"kind": "holmes topology", "version": 1, **files.plain({"hosts": self.hosts, "fabrics": self.fabrics})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """The inverse of `to_dict`. Raises ValueError naming what is wrong."""
        files.check_kind(data, "holmes topology", version=1)
        hosts = [
            Host(**{**entry, "ranks": tuple(entry["ranks"]), "ports": tuple(Port(**port) for port in entry["ports"])})
            for entry in data["hosts"]
        ]
        return make_topology(hosts, [Fabric(**entry) for entry in data["fabrics"]])

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Reads what `save` wrote. Raises ValueError naming the file and what is wrong."""
        return cls.from_dict(files.load(path))


def merge_hosts(inventories: Sequence[NodeInventory]) -> tuple[Host, ...]:
    """Hosts in the order of their lowest rank; the lowest rank's view of the NICs counts. Names become unique.

    Raises ValueError where the ranks are not exactly 0 to N-1.
    """
    ranks = sorted(inventory.rank for inventory in inventories)
    if ranks != list(range(len(inventories))):
        raise ValueError(f"inventories must be of ranks 0 to {len(inventories) - 1}, once each; got {ranks}")
    by_host: dict[str, list[NodeInventory]] = {}
    for inventory in sorted(inventories, key=lambda item: item.rank):
        by_host.setdefault(inventory.host_id, []).append(inventory)
    names = [members[0].host for members in by_host.values()]
    return tuple(
        Host(
            name=names[i] if names.count(names[i]) == 1 else f"{names[i]}#{i}",
            host_id=host_id,
            ranks=tuple(inventory.rank for inventory in members),
            ports=members[0].ports,
        )
        for i, (host_id, members) in enumerate(by_host.items())
    )


def candidate_fabrics(hosts: Sequence[Host]) -> tuple[Fabric, ...]:
    """Assumed fabrics, best first; each joins at least two hosts, of which the fastest NIC in it counts.

    NICs of one class in one subnet; where RoCE and plain Ethernet NICs share a subnet, also all of them as Ethernet;
    and where Ethernet NICs with a gateway lie in several subnets, all of those, as one routed fabric.
    """
    members: dict[tuple[str, str], dict[str, Port]] = {}
    for host in hosts:
        for port in sorted(host.ports, key=lambda item: (item.is_rdma, -(item.speed_gbps or 0.0), item.name)):
            keys = [(port.nic_class, port.subnet)]
            if port.nic_class != "infiniband":
                keys.append(("ethernet", port.subnet))
                if port.has_gateway:
                    keys.append(("ethernet", ROUTED))
            for key in keys:
                members.setdefault(key, {}).setdefault(host.host_id, port)
    fabrics = []
    for (nic_class, subnet), ports in members.items():
        only_roce = nic_class == "ethernet" and all(port.is_rdma for port in ports.values())
        one_subnet = subnet == ROUTED and len({port.subnet for port in ports.values()}) == 1
        if len(ports) > 1 and not only_roce and not one_subnet:
            fabrics.append(make_fabric(f"{nic_class} {subnet}", nic_class, subnet, ports, confirmed=False))
    return tuple(sorted(fabrics, key=Fabric.preference))


def make_fabric(name: str, nic_class: str, subnet: str, ports: Mapping[str, Port], *, confirmed: bool) -> Fabric:
    """A fabric of these ports (host id -> port); as fast as the slowest whose speed is known."""
    speeds = [port.speed_gbps for port in ports.values() if port.speed_gbps]
    nics = {host_id: port.name for host_id, port in ports.items()}
    return Fabric(name, nic_class, subnet, min(speeds) if speeds else None, nics, confirmed)


def find_clusters(hosts: Sequence[Host], fabrics: Sequence[Fabric]) -> tuple[Cluster, ...]:
    """Every host joins the best fabric that it shares with a host not yet in a cluster; clusters by lowest rank."""
    free = {host.host_id: host for host in hosts}
    found: list[tuple[list[Host], Fabric | None]] = []
    for fabric in sorted(fabrics, key=Fabric.preference):
        members = [host for host_id, host in free.items() if host_id in fabric.ports]
        if len(members) > 1:
            found.append((members, fabric))
            free = {host_id: host for host_id, host in free.items() if host_id not in fabric.ports}
    found += [([host], None) for host in free.values()]
    found.sort(key=lambda item: item[0][0].ranks[0])
    return tuple(
        Cluster(
            name=f"cluster {i}",
            hosts=tuple(host.name for host in members),
            ranks=tuple(rank for host in members for rank in host.ranks),
            fabric=fabric.name if fabric else None,
            nic_class=fabric.nic_class if fabric else None,
        )
        for i, (members, fabric) in enumerate(found)
    )


def make_topology(hosts: Sequence[Host], fabrics: Sequence[Fabric]) -> Topology:
    """The topology of these hosts and fabrics, its clusters found."""
    return Topology(
        hosts=tuple(hosts),
        fabrics=tuple(sorted(fabrics, key=Fabric.preference)),
        clusters=find_clusters(hosts, fabrics),
    )
