"""Groups: tensor parallel inside a host, data parallel inside a cluster, pipeline across; a NIC selection for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holmes.topology import ROUTED, Cluster, Fabric, Topology

KINDS = {"tp": "tensor parallel", "dp": "data parallel", "pp": "pipeline"}


@dataclass(frozen=True)
class Group:
    """The ranks of one group, in group-rank order, the NIC names each of them uses, and why.

    `nics` maps a rank to its rails, in the same order on every rank; without entries the ranks share a host and use
    shared memory. `nic_class` is None then.
    """

    kind: str
    ranks: tuple[int, ...]
    nics: Mapping[int, tuple[str, ...]]
    nic_class: str | None
    reason: str


@dataclass(frozen=True)
class Grouping:
    """`stages[s][d]` is the tensor-parallel block (ranks) of stage s and data-parallel index d."""

    stages: tuple[tuple[tuple[int, ...], ...], ...]
    groups: tuple[Group, ...]


def make_grouping(topology: Topology, tensor: int, pipeline: int) -> Grouping:
    """Groups of all ranks for these sizes; the data-parallel size is world size / (tensor * pipeline).

    Every stage lies inside one cluster, every tensor group inside one host. Raises ValueError, with all numbers and the
    nearest sizes that work, where that is impossible, and where ranks of a group share no network.
    """
    check_sizes(topology, tensor, pipeline)
    data = topology.world_size // (tensor * pipeline)
    blocks = [block for cluster in topology.clusters for block in _tensor_blocks(topology, cluster, tensor)]
    stages = tuple(tuple(blocks[s * data : (s + 1) * data]) for s in range(pipeline))
    members = [("tp", block) for block in blocks]
    members += [("dp", tuple(block[t] for block in stage)) for stage in stages for t in range(tensor)]
    members += [("pp", tuple(stage[d][t] for stage in stages)) for d in range(data) for t in range(tensor)]
    return Grouping(stages, tuple(make_group(topology, kind, ranks) for kind, ranks in members))


def make_group(topology: Topology, kind: str, ranks: Sequence[int]) -> Group:
    """A group on the best NICs that all of its ranks share. Raises ValueError where they share no network."""
    hosts = {rank: topology.host_of(rank) for rank in ranks}
    if len(ranks) == 1:
        return Group(kind, tuple(ranks), {}, None, "one rank: no communication")
    if len({host.host_id for host in hosts.values()}) == 1:
        return Group(kind, tuple(ranks), {}, None, f"all on host {hosts[ranks[0]].name}: shared memory")
    shared = topology.shared_fabrics(ranks)
    if not shared:
        seen = "; ".join(
            f"{host.name}: {', '.join(f'{p.name} {p.nic_class} {p.subnet}' for p in host.ports) or 'no usable NIC'}"
            for host in dict.fromkeys(hosts.values())
        )
        raise ValueError(
            f"ranks {list(ranks)} of a {KINDS[kind]} group share no network ({seen}); give all of these hosts a NIC in "
            "one subnet and check with `holmes topology` that it is reachable"
        )
    best = shared[0]
    rails = [fabric for fabric in shared if _grade(fabric) == _grade(best)]
    nics = {rank: tuple(fabric.ports[host.host_id] for fabric in rails) for rank, host in hosts.items()}
    speed = "" if best.speed_gbps is None else f", {best.speed_gbps:g} Gbit/s" + (" each" if len(rails) > 1 else "")
    subnets = " + ".join(fabric.subnet for fabric in rails)
    reason = f"best network that all {len(ranks)} ranks share: {best.nic_class} {subnets}{speed}"
    return Group(kind, tuple(ranks), nics, best.nic_class, reason)


def check_tensor(topology: Topology, tensor: int) -> None:
    """Raises ValueError, with all numbers and the nearest fix, unless `tensor` divides the ranks of every host."""
    ranks_per_host = {host.name: len(host.ranks) for host in topology.hosts}
    common = math.gcd(*ranks_per_host.values())
    if tensor < 1 or common % tensor:
        works = [t for t in range(1, common + 1) if common % t == 0]
        raise ValueError(
            f"tensor={tensor} must divide the ranks of every host ({_numbers(ranks_per_host)}); "
            f"the nearest size that does: tensor={_nearest(works, tensor)}"
        )


def check_sizes(topology: Topology, tensor: int, pipeline: int) -> None:
    """Raises ValueError, with all numbers and the nearest fix, unless the sizes fit the hosts and clusters."""
    check_tensor(topology, tensor)
    world = topology.world_size
    if pipeline not in (works := possible_pipelines(topology, tensor)):
        ranks_per_cluster = {cluster.name: len(cluster.ranks) for cluster in topology.clusters}
        problem = (
            f"{world} ranks / (tensor={tensor} * pipeline={pipeline}) is not a whole number"
            if pipeline < 1 or world % (tensor * pipeline)
            else f"a stage of {world // pipeline} ranks does not divide the ranks of every cluster"
        )
        raise ValueError(
            f"pipeline={pipeline} does not fit: {problem}, and a stage must lie inside one cluster "
            f"({_numbers(ranks_per_cluster)}); the nearest size that fits: pipeline={_nearest(works, pipeline)} "
            f"(all: {works})"
        )


def possible_pipelines(topology: Topology, tensor: int) -> list[int]:
    """All pipeline sizes whose stages divide every cluster, ascending; `tensor` must divide the ranks of every host."""
    common = math.gcd(*(len(cluster.ranks) for cluster in topology.clusters))
    return [topology.world_size // width for width in range(common, 0, -1) if common % width == width % tensor == 0]


def _tensor_blocks(topology: Topology, cluster: Cluster, tensor: int) -> list[tuple[int, ...]]:
    hosts = [host for host in topology.hosts if host.name in cluster.hosts]
    return [host.ranks[i : i + tensor] for host in hosts for i in range(0, len(host.ranks), tensor)]


def _grade(fabric: Fabric) -> tuple[str, float | None, bool]:
    """Fabrics of one grade serve one group as its rails."""
    return (fabric.nic_class, fabric.speed_gbps, fabric.subnet == ROUTED)


def _nearest(works: Sequence[int], wanted: int) -> int:
    return min(works, key=lambda size: (abs(size - wanted), size))


def _numbers(counts: Mapping[str, int]) -> str:
    if len(set(counts.values())) == 1 and len(counts) > 4:
        return f"{len(counts)} times {next(iter(counts.values()))}"
    return ", ".join(f"{name}: {count}" for name, count in counts.items())
