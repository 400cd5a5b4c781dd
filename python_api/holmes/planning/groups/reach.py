"""Reach: where ranks are and which networks their hosts share, for many groups at once. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holmes.cluster.topology import Cluster, Topology, is_verbs_only
from holmes.cluster.topology.preference import best_first
from holmes.words import short
from holmes_comm.errors import UsageError

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.object_]  # a Python integer each: any number of networks


@dataclass(frozen=True)
class HostRanks:
    """A host's name and the ranks on it."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """What joins hosts: NICs of one class in one subnet. `nics` maps a host's number to its NIC's name.

    `rate_gbps`: what to plan with, measured or the line rate; None: unknown. `is_child`: some host is in it through a
    NIC that shares another one's wire (a VLAN), so that it is no rail beside another network.
    """

    name: str
    nic_class: str
    subnet: str
    rate_gbps: float | None
    nics: Mapping[int, str]
    is_child: bool = False


class Rails(NamedTuple):
    """The networks that one group uses together, and why in words; no networks: its ranks share none."""

    networks: tuple[Network, ...]
    reason: str

    @property
    def nic_class(self) -> str | None:
        """Of all rails; None without any."""
        return self.networks[0].nic_class if self.networks else None

    @property
    def is_verbs_only(self) -> bool:
        """Whether their ports have no IP address."""
        return any(is_verbs_only(network.subnet) for network in self.networks)

    @property
    def rate_gbps(self) -> float | None:
        """Of all rails together; None where it is unknown."""
        rates = [network.rate_gbps for network in self.networks if network.rate_gbps is not None]
        return sum(rates) if rates and len(rates) == len(self.networks) else None


class Shared(NamedTuple):
    """Of many groups, an entry each: whether all ranks are on one host; the networks all share, a bit each; the number
    of the cluster they all are in, -1 where they are in several."""

    one_host: npt.NDArray[np.bool_]
    networks: Bits
    cluster: Ints


class Reach:
    """Hosts, clusters and networks (best first). Immutable; safe to share between threads."""

    def __init__(
        self, hosts: Sequence[HostRanks], clusters: Sequence[Cluster], networks: Sequence[Network], world_size: int
    ) -> None:
        self.hosts, self.clusters, self.networks = tuple(hosts), tuple(clusters), tuple(networks)
        ranks = np.concatenate([np.asarray(host.ranks, dtype=np.int64) for host in self.hosts])
        if not np.array_equal(np.sort(ranks), np.arange(world_size)):
            raise UsageError(
                f"hosts must hold each of {world_size} ranks once, but hold {short(np.sort(ranks).tolist())}"
            )
        self.host_of: Ints = np.empty(world_size, dtype=np.int64)
        self.host_of[ranks] = np.repeat(np.arange(len(self.hosts)), [len(host.ranks) for host in self.hosts])
        cluster_of_name = {name: i for i, cluster in enumerate(self.clusters) for name in cluster.hosts}
        self.cluster_of_host: Ints = np.array([cluster_of_name[host.name] for host in self.hosts], dtype=np.int64)
        self._rails: dict[int, Rails] = {}
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}

    @classmethod
    def of_topology(cls, topology: Topology) -> Reach:
        """Of a topology's hosts, clusters and fabrics."""
        number = {host.host_id: i for i, host in enumerate(topology.hosts)}
        networks = [
            Network(
                fabric.name,
                fabric.nic_class,
                fabric.subnet,
                fabric.rate_gbps,
                {number[host_id]: nic for host_id, nic in fabric.ports.items() if host_id in number},
                fabric.name in topology.child_fabrics,
            )
            for fabric in topology.fabrics
        ]
        hosts = [HostRanks(host.name, host.ranks) for host in topology.hosts]
        return cls(hosts, topology.clusters, networks, topology.world_size)

    @cached_property
    def _bits(self) -> Bits:
        bits = [0] * len(self.hosts)
        for i, network in enumerate(self.networks):
            for host in network.nics:
                bits[host] |= 1 << i
        return np.array(bits, dtype=object)

    def shared(self, ranks: Ints) -> Shared:
        """What each of many groups shares; `ranks` is (groups, ranks of a group)."""
        hosts = self.host_of[ranks]
        clusters = self.cluster_of_host[hosts]
        one_cluster = (clusters == clusters[:, :1]).all(axis=1)
        return Shared(
            one_host=(hosts == hosts[:, :1]).all(axis=1),
            networks=np.bitwise_and.reduce(self._bits[hosts], axis=1),
            cluster=np.where(one_cluster, clusters[:, 0], -1),
        )

    def shared_in_cluster(self, cluster: int) -> int:
        """The networks (a bit each) that all hosts of a cluster share."""
        return int(np.bitwise_and.reduce(self._bits[self.cluster_of_host == cluster]))

    def with_ip(self, networks: int) -> int:
        """Those of these networks (a bit each) that sockets reach."""
        return networks & self._ip_bits

    @cached_property
    def _ip_bits(self) -> int:
        return sum(1 << i for i, network in enumerate(self.networks) if not is_verbs_only(network.subnet))

    def rails(self, networks: int) -> Rails:
        """The best of these networks (a bit each) and its rails (docs/nics.md)."""
        found = self._rails.get(networks)
        if found is None:
            found = self._rails.setdefault(networks, self._best_of(networks))
        return found

    def nics(self, networks: int, host: int) -> tuple[str, ...]:
        """The names of a host's NICs in `rails(networks)`, in the same order on every host."""
        key = (networks, host)
        names = self._names.get(key)
        if names is None:
            names = tuple(network.nics[host] for network in self.rails(networks).networks)
            self._names[key] = names
        return names

    def describe_hosts(self, hosts: Sequence[int]) -> str:
        """The NICs of these hosts, for messages."""
        seen = []
        for host in dict.fromkeys(hosts):
            ports = [f"{n.nics[host]} {n.nic_class} {n.subnet}" for n in self.networks if host in n.nics]
            seen.append(f"{self.hosts[host].name}: {', '.join(ports) or 'no network'}")
        return "; ".join(seen[:4]) + (f"; and {len(seen) - 4} more hosts" if len(seen) > 4 else "")

    def _best_of(self, networks: int) -> Rails:
        members = [network for i, network in enumerate(self.networks) if networks >> i & 1]
        if not members:
            return Rails((), "its ranks share no network")
        rails = best_first(members, lambda one: one.nics, lambda one: one.is_child, same_hosts=False)[0]
        rates = sorted({rail.rate_gbps for rail in rails if rail.rate_gbps is not None})
        rate = "" if not rates else f", {' to '.join(f'{rate:g}' for rate in (rates[:1] + rates[1:][-1:]))} Gbit/s"
        each = " each" if rates and len(rails) > 1 else ""
        return Rails(tuple(rails), f"{rails[0].nic_class} {' + '.join(rail.subnet for rail in rails)}{rate}{each}")
