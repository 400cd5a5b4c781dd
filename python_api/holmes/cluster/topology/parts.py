"""The parts of a topology: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holmes.cluster.topology.preference import are_alike

RDMA_CLASSES = ("infiniband", "roce_v2", "roce_v1")
NIC_CLASSES = (*RDMA_CLASSES, "ethernet")


@dataclass(frozen=True)
class Port:
    """One usable NIC of a host: it is up and has an IP address, or is an RDMA port (`name` "mlx5_0:1") that has none.

    `speed_gbps` is None where the driver tells none. `nic_class` is one of NIC_CLASSES; `subnet` names the wire ("GID
    fe80::/64" and a GID as `address` where there is no IP address); `has_gateway`: a route through it uses a gateway.
    `parent`: the NIC whose wire it shares, of a VLAN or an IPoIB child; empty: it has its own. Written by hand,
    `subnet` may be any text and `address` empty.
    """

    name: str
    nic_class: str
    address: str
    subnet: str
    speed_gbps: float | None = None
    has_gateway: bool = False
    parent: str = ""

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
    connections were tried (holmes.cluster.probe) or only assumed.

    Measured between sampled pairs of hosts, None where not: `measured_gbps` (TCP payload, one direction, median) and
    `measured_min_gbps`, `latency_s` (one way, median). `jitter_s`: as written by hand, by how much the slowest of a
    hundred packets comes later. `host_limited`: the hosts' processors, not the network, bounded
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
    jitter_s: float | None = None

    @property
    def rate_gbps(self) -> float | None:
        """The rate to plan with: the measured one, but the line rate where the measurement is only a lower bound."""
        if self.measured_gbps is None or (self.host_limited and self.speed_gbps is not None):
            return self.speed_gbps
        return self.measured_gbps

    def port_of(self, host: Host) -> Port | None:
        """The NIC of `host` in this fabric; None where it has none."""
        name = self.ports.get(host.host_id)
        return next((port for port in host.ports if port.name == name), None)

    def is_like(self, other: Fabric) -> bool:
        """True where both are of one class and about one rate, so that one operation may be striped over them."""
        return are_alike(self, other)


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
    """What two clusters have between them over their best common fabric (TCP payload, one direction).

    `gbps` and `latency_s` (one way) are of one pair of hosts alone, `aggregate_gbps` is the sum over `pairs` of them at
    once. Where it is far below `pairs` times `gbps`, the pairs share a bottleneck. `jitter_s`: as of a `Fabric`.
    """

    clusters: tuple[str, str]
    fabric: str
    gbps: float
    latency_s: float
    pairs: int
    aggregate_gbps: float
    jitter_s: float | None = None

    @property
    def is_shared(self) -> bool:
        """True where several pairs at once had less than half of what they would have had side by side."""
        return self.pairs > 1 and self.aggregate_gbps < 0.5 * self.pairs * self.gbps


@dataclass(frozen=True)
class Pair:
    """What two hosts, by name, have between one NIC of each (TCP payload, the slower direction; one way)."""

    hosts: tuple[str, str]
    nics: tuple[str, str]
    gbps: float
    latency_s: float


@dataclass(frozen=True)
class TopologyFinding:
    """Something contradictory or slow: on which host and NIC, what, and what to do. `kind` is a short word for it."""

    kind: str
    host: str
    nic: str
    problem: str
    fix: str

    def __str__(self) -> str:
        """One line for people."""
        return f"host {self.host} NIC {self.nic} ({self.kind}): {self.problem}. To do: {self.fix}"
