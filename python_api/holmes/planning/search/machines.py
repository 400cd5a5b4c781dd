"""Machines: a topology in short, as the search needs it: what a cluster's hosts can do, and what joins them.

Hosts of a cluster are alike, so that the cost of a search does not grow with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holmes.cluster.topology import Cluster, Fabric, Host, Link, Topology
from holmes.planning.model.gpus import Gpu, gpu_named
from holmes.planning.simulate.rates import LinkRate
from holmes_comm.errors import UsageError


@dataclass(frozen=True)
class NetworkRate:
    """What ranks use together: the fabrics' names, and the rate of a host, all its rails."""

    name: str
    rate: LinkRate


@dataclass(frozen=True)
class ClusterMachines:
    """One cluster: `tflops` is what one GPU reaches (peak times efficiency); `network` joins its hosts (None: one
    host); `tensor_gbps` of a GPU to the others of its host, None where unknown."""

    name: str
    hosts: int
    ranks_per_host: int
    tflops: float
    memory_bytes: float
    tensor_gbps: float | None
    network: NetworkRate | None

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def kind(self) -> tuple[object, ...]:
        """Clusters of equal kind may stand for each other."""
        rate = self.network.rate if self.network else None
        return (self.hosts, self.ranks_per_host, self.tflops, self.memory_bytes, self.tensor_gbps, rate)


@dataclass(frozen=True)
class Machines:
    """All clusters, and the network that the pipeline uses over them (None: one host).

    `between`: names of two clusters (sorted) to what was measured between them, where it was.
    """

    clusters: tuple[ClusterMachines, ...]
    pipeline: NetworkRate | None
    between: Mapping[tuple[str, str], Link]

    @property
    def ranks(self) -> int:
        """Of all clusters."""
        return sum(cluster.ranks for cluster in self.clusters)

    def between_of(self, one: str, other: str) -> Link | None:
        """What was measured between these clusters; None where nothing was."""
        return self.between.get((min(one, other), max(one, other)))

    def host_gbps(self, one: str, other: str, hosts: int) -> float:
        """What a host gets between these clusters, each way, when so many of each send; infinite where unknown."""
        link = self.between_of(one, other)
        if link is None:
            return math.inf
        return min(link.gbps, link.aggregate_gbps / hosts) if link.is_shared else link.gbps


@dataclass(frozen=True)
class Assumptions:
    """What a topology may not say.

    `efficiency`: share of its peak that a GPU reaches inside a layer; `compute_tflops`: that rate itself, as measured,
    for all GPUs; `gpu`: the type where the topology names none; `nic_efficiency`: share of a line rate that was not
    measured; `reserve_gib`: memory of a GPU for driver, kernels, buffers and fragmentation; `tensor_gbps`: inside a
    host, for all GPUs.
    """

    efficiency: float = 0.5
    compute_tflops: float | None = None
    gpu: str | None = None
    nic_efficiency: float = 0.9
    reserve_gib: float = 4.0
    tensor_gbps: float | None = None

    def __post_init__(self) -> None:
        for name in ("efficiency", "nic_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)} must be above 0 and at most 1")
        for name in ("compute_tflops", "tensor_gbps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value} must be above 0")
        if not self.reserve_gib >= 0:
            raise UsageError(f"reserve_gib={self.reserve_gib} must be at least 0")
        if self.gpu is not None:
            gpu_named(self.gpu)  # known, also where no host needs it


def machines_of(topology: Topology, assumptions: Assumptions) -> Machines:
    """The machines of a topology. Raises ValueError naming the host whose GPU is unknown or whose hosts differ."""
    clusters = tuple(_cluster(topology, cluster, assumptions) for cluster in topology.clusters)
    first_ranks = [host.ranks[0] for host in topology.hosts]
    pipeline = None
    if len(topology.hosts) > 1:
        pipeline = _network(topology.rails(first_ranks), assumptions)
        if pipeline is None:
            raise UsageError(
                f"no network joins all {len(topology.hosts)} hosts, so no pipeline can run over them; add one to the "
                "topology, or plan for each cluster on its own"
            )
    between = {(min(link.clusters), max(link.clusters)): link for link in topology.links}
    return Machines(clusters, pipeline, between)


def _cluster(topology: Topology, cluster: Cluster, assumptions: Assumptions) -> ClusterMachines:
    hosts = [topology.host_named(name) for name in cluster.hosts]
    first = hosts[0]
    for host in hosts[1:]:
        for what, value, other in (
            ("ranks", len(host.ranks), len(first.ranks)),
            ("gpu", host.gpu, first.gpu),
            ("gpu_memory_gib", host.gpu_memory_gib, first.gpu_memory_gib),
            ("gpu_tflops", host.gpu_tflops, first.gpu_tflops),
        ):
            if value != other:
                raise UsageError(
                    f"hosts of {cluster.name} differ: {host.name} has {what} {value}, {first.name} has {other}; the "
                    "search needs equal hosts in a cluster: leave some out, or give them networks of their own"
                )
    network = None
    if len(hosts) > 1:
        network = _network(topology.rails([host.ranks[0] for host in hosts]), assumptions)
    tflops, memory_gib, tensor_gbps = _gpu_facts(first, assumptions)
    memory_bytes = (memory_gib - assumptions.reserve_gib) * 2**30
    if memory_bytes <= 0:
        raise UsageError(
            f"reserve_gib={assumptions.reserve_gib} leaves nothing of the {memory_gib} GiB of {first.name}'s GPUs"
        )
    return ClusterMachines(cluster.name, len(hosts), len(first.ranks), tflops, memory_bytes, tensor_gbps, network)


def _gpu_facts(host: Host, assumptions: Assumptions) -> tuple[float, float, float | None]:
    """TFLOP/s reached, GiB, and Gbit/s inside the host."""
    known: Gpu | None = None
    name = host.gpu or assumptions.gpu
    if name is not None:
        try:
            known = gpu_named(name)
        except ValueError:
            if host.gpu_memory_gib is None or (host.gpu_tflops is None and assumptions.compute_tflops is None):
                raise
    peak = host.gpu_tflops or (known.tflops if known else None)
    memory_gib = host.gpu_memory_gib or (known.memory_gib if known else None)
    tflops = assumptions.compute_tflops or (peak * assumptions.efficiency if peak else None)
    if tflops is None or memory_gib is None:
        missing = " and ".join(
            text for text, value in (("gpu_tflops", tflops), ("gpu_memory_gib", memory_gib)) if value is None
        )
        raise UsageError(
            f"host {host.name} of the topology does not say its GPU's {missing}: write `gpu: A100-80GB` or the numbers "
            "there, or pass --gpu"
        )
    return tflops, memory_gib, assumptions.tensor_gbps or (known.tensor_gbps if known else None)


def _network(rails: tuple[Fabric, ...], assumptions: Assumptions) -> NetworkRate | None:
    if not rails:
        return None
    gbps = 0.0
    for fabric in rails:
        rate = fabric.rate_gbps
        if rate is None:
            raise UsageError(
                f"the rate of {fabric.name} is unknown: give speed_gbps of its NICs or measured_gbps of the fabric in "
                "the topology"
            )
        gbps += rate * (assumptions.nic_efficiency if rate == fabric.speed_gbps else 1.0)
    latency_s = max(fabric.latency_s or 0.0 for fabric in rails)
    name = rails[0].name if len(rails) == 1 else f"{len(rails)} rails of {rails[0].nic_class} ({rails[0].name}, ...)"
    jitter_s = max(fabric.jitter_s or 0.0 for fabric in rails)
    return NetworkRate(name, LinkRate(gbps, latency_s, jitter_s=jitter_s))
