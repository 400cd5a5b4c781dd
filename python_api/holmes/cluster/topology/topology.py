"""The whole, and the questions that planning asks it, answered from indexes built once. Clusters follow from the
fabrics: hosts that share their best one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from holmes import files
from holmes.cluster.topology.fabrics import child_fabrics, in_order
from holmes.cluster.topology.parts import Cluster, Fabric, Host, Link, Pair, TopologyFinding
from holmes.cluster.topology.preference import best_first
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class Topology:
    """All hosts, the fabrics that join them, best first, and the clusters. Saved as YAML or JSON that may be edited.

    Lookups by rank or host take constant time, from indexes made at the first one. Thread safe.
    """

    hosts: tuple[Host, ...]
    fabrics: tuple[Fabric, ...]
    clusters: tuple[Cluster, ...]
    findings: tuple[TopologyFinding, ...] = ()
    links: tuple[Link, ...] = ()
    pairs: tuple[Pair, ...] = ()  # those that were measured

    @cached_property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return sum(len(host.ranks) for host in self.hosts)

    def host_of(self, rank: int) -> Host:
        """The host that runs `rank`. Raises ValueError naming the ranks there are."""
        try:
            return self._host_by_rank[rank]
        except KeyError:
            raise self._no_rank(rank) from None

    def cluster_of(self, rank: int) -> Cluster:
        """The cluster of `rank`. Raises ValueError naming the ranks there are."""
        try:
            return self._cluster_by_rank[rank]
        except KeyError:
            raise self._no_rank(rank) from None

    def host_named(self, name: str) -> Host:
        """The host of this name. Raises ValueError naming those there are."""
        try:
            return self._host_by_name[name]
        except KeyError:
            some = ", ".join(host.name for host in self.hosts[:8]) + (", ..." if len(self.hosts) > 8 else "")
            raise UsageError(f"no host {name!r} in this topology; it has {some}") from None

    def fabric_named(self, name: str) -> Fabric:
        """The fabric of this name. Raises ValueError naming those there are."""
        for fabric in self.fabrics:
            if fabric.name == name:
                return fabric
        raise UsageError(f"no fabric {name!r} in this topology; it has {', '.join(f.name for f in self.fabrics)}")

    def shared_fabrics(self, ranks: Iterable[int]) -> tuple[Fabric, ...]:
        """The fabrics that join the hosts of all these ranks, best first; each adds a NIC on some host."""
        host_ids = dict.fromkeys(self.host_of(rank).host_id for rank in ranks)
        return self.fabrics_between(host_ids)

    def fabrics_between(self, host_ids: Iterable[str]) -> tuple[Fabric, ...]:
        """As `shared_fabrics`, for hosts given by their ids."""
        ids = tuple(host_ids)
        shared = (1 << len(self.fabrics)) - 1
        for host_id in ids:
            shared &= self._fabrics_of_host.get(host_id, 0)
        found: list[Fabric] = []
        used: set[tuple[str, str]] = set()
        while shared:
            fabric = self.fabrics[(shared & -shared).bit_length() - 1]
            shared &= shared - 1
            nics = [(host_id, fabric.ports[host_id]) for host_id in ids]
            # One NIC may lie in several fabrics: a RoCE NIC in an Ethernet one too, a fast part in the whole.
            if not found or not used.issuperset(nics):
                found.append(fabric)
                used.update(nics)
        return tuple(found)

    def rails(self, ranks: Iterable[int]) -> tuple[Fabric, ...]:
        """The best fabric that joins these ranks and all like it, no two through one NIC; empty where none joins them.

        One operation of these ranks may be striped over all of them.
        """
        shared = self.shared_fabrics(ranks)
        ordered = best_first(
            shared, lambda fabric: fabric.ports, lambda fabric: fabric.name in self.child_fabrics, same_hosts=False
        )
        return tuple(ordered[0]) if ordered else ()

    @cached_property
    def child_fabrics(self) -> set[str]:
        """The names of the fabrics in which some host is through a NIC that shares another one's wire (a VLAN)."""
        return child_fabrics(self.hosts, self.fabrics)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings. The clusters are left out: they follow from the rest."""
        from holmes.cluster.topology.file import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Topology:
        """Reads what `to_dict` made or a person wrote (docs/topology.md). Raises ValueError naming what is wrong."""
        from holmes.cluster.topology.file import from_dict

        return from_dict(data)

    def save(self, path: str | Path) -> None:
        """Writes .yaml, .yml or .json."""
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Reads what `save` or a person wrote. Raises ValueError naming the file, the field, its value and the fix."""
        return files.load_as(path, cls.from_dict)

    @cached_property
    def _host_by_rank(self) -> dict[int, Host]:
        return {rank: host for host in self.hosts for rank in host.ranks}

    @cached_property
    def _host_by_name(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def _cluster_by_rank(self) -> dict[int, Cluster]:
        return {rank: cluster for cluster in self.clusters for rank in cluster.ranks}

    @cached_property
    def _fabrics_of_host(self) -> dict[str, int]:
        """Host id -> a bit for each fabric, the best one's lowest."""
        bits: dict[str, int] = {}
        for index, fabric in enumerate(self.fabrics):
            for host_id in fabric.ports:
                bits[host_id] = bits.get(host_id, 0) | 1 << index
        return bits

    def _no_rank(self, rank: int) -> ValueError:
        return ValueError(f"rank {rank} is not in this topology; it has ranks 0 to {self.world_size - 1}")


def find_clusters(hosts: Sequence[Host], fabrics: Sequence[Fabric]) -> tuple[Cluster, ...]:
    """Every host joins the best fabric that it shares with a host not yet in a cluster; clusters by lowest rank."""
    free = {host.host_id: host for host in hosts}
    found: list[tuple[list[Host], Fabric | None]] = []
    for fabric in in_order(hosts, fabrics):
        members = [free[host_id] for host_id in fabric.ports if host_id in free]
        if len(members) > 1:
            found.append((sorted(members, key=_lowest_rank), fabric))
            for host in members:
                del free[host.host_id]
    found += [([host], None) for host in free.values()]
    found.sort(key=lambda item: _lowest_rank(item[0][0]))
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


def make_topology(
    hosts: Sequence[Host],
    fabrics: Sequence[Fabric],
    findings: Sequence[TopologyFinding] = (),
    links: Sequence[Link] = (),
    pairs: Sequence[Pair] = (),
) -> Topology:
    """The topology of these hosts and fabrics, its clusters found."""
    return Topology(
        hosts=tuple(hosts),
        fabrics=in_order(hosts, fabrics),
        clusters=find_clusters(hosts, fabrics),
        findings=tuple(findings),
        links=tuple(links),
        pairs=tuple(pairs),
    )


def _lowest_rank(host: Host) -> int:
    return host.ranks[0]
