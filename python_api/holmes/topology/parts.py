"""The parts of a topology: plain frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RDMA_CLASSES = ("infiniband", "roce_v2", "roce_v1")
NIC_CLASSES = (*RDMA_CLASSES, "ethernet")
ROUTED = "routed"  # in place of a subnet: several subnets joined by gateways
# Fabrics within this share of the best one's rate are worth striping over together with it.
_ALIKE = 0.75


@dataclass(frozen=True)
class Port:
    """One usable NIC of a host: it is up and has an IP address. `speed_gbps` is None where the driver tells none.

    `nic_class` is one of NIC_CLASSES; `subnet` names the wire; `has_gateway`: a route through it uses a gateway.
    Written by hand, `subnet` may be any text and `address` empty.
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
    """A host and the ranks that run on it, in ascending order, one GPU each.

    Of its GPUs, None where unknown: `gpu` the type ("A100-SXM4-80GB"), `gpu_memory_gib` of one, and `gpu_tflops`, the
    dense peak of one in the format one trains in.
    """

    name: str
    host_id: str
    ranks: tuple[int, ...]
    ports: tuple[Port, ...]
    gpu: str | None = None
    gpu_memory_gib: float | None = None
    gpu_tflops: float | None = None


@dataclass(frozen=True)
class Fabric:
    """Hosts that reach each other through NICs of one class in one subnet.

    `ports` maps a host id to the NIC's name; `speed_gbps` is the slowest member's line rate; `confirmed` tells whether
    connections were tried (holmes.probe) or only assumed.

    Measured between sampled pairs of hosts, None where not: `measured_gbps` (TCP payload, one direction, median) and
    `measured_min_gbps`, `latency_s` (one way, median). `host_limited`: the hosts' processors, not the network, bounded
    the rate, which is then a lower bound.
    """

    name: str
    nic_class: str
    subnet: str
    speed_gbps: float | None
    ports: Mapping[str, str]
    confirmed: bool = False
    measured_gbps: float | None = None
    measured_min_gbps: float | None = None
    latency_s: float | None = None
    host_limited: bool = False

    @property
    def rate_gbps(self) -> float | None:
        """The rate to plan with: the measured one, but the line rate where the measurement is only a lower bound."""
        if self.measured_gbps is None or (self.host_limited and self.speed_gbps is not None):
            return self.speed_gbps
        return self.measured_gbps

    def joins(self, host_ids: Iterable[str]) -> bool:
        """True when every one of these hosts has a NIC in this fabric."""
        return all(host_id in self.ports for host_id in host_ids)

    def is_like(self, other: Fabric) -> bool:
        """True where both are of one class and about one rate, so that one operation may be striped over them."""
        mine, its = self.rate_gbps, other.rate_gbps
        same_rate = mine == its if mine is None or its is None else min(mine, its) >= _ALIKE * max(mine, its)
        routed = (self.subnet == ROUTED, other.subnet == ROUTED)
        return self.nic_class == other.nic_class and same_rate and routed[0] == routed[1]

    def preference(self) -> tuple[bool, bool, float, int, str]:
        """Sort key, best first: RDMA, Ethernet, routed; then the faster, then the larger one."""
        return (
            self.subnet == ROUTED,
            self.nic_class not in RDMA_CLASSES,
            -(self.rate_gbps or 0.0),
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
class Link:
    """What two clusters have between them, measured by `pairs` pairs of hosts at once, over their best common fabric.

    `aggregate_gbps` is the sum over the pairs (TCP payload, one direction). Where it is far below `pairs` times the
    fabric's rate, the clusters share a bottleneck.
    """

    clusters: tuple[str, str]
    fabric: str
    pairs: int
    aggregate_gbps: float


@dataclass(frozen=True)
class Finding:
    """Something contradictory or slow: on which host and NIC, what, and what to do. `kind` is a short word for it."""

    kind: str
    host: str
    nic: str
    problem: str
    fix: str

    def __str__(self) -> str:
        """One line for people."""
        return f"host {self.host} NIC {self.nic}: {self.problem}; {self.fix}"
