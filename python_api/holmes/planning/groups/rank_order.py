"""The logical order of ranks: tensor groups inside hosts, context groups too where they fit, stages inside clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from holmes.cluster.topology import Cluster, Topology


def order_ranks(
    topology: Topology, clusters: Iterable[Cluster], *, tensor: int, context: int, expert_tensor: int
) -> tuple[int, ...]:
    """The ranks of these clusters, cluster by cluster, whatever order they were started in.

    Inside a cluster, host by host: blocks that no tensor group leaves; blocks of context groups whole on one host
    first, as far as they fit, then what is left over, host after host. The sizes must fit (`check_sizes`).
    """
    block = math.lcm(tensor, expert_tensor)
    unit = math.lcm(tensor * context, block)
    hosts = {host.name: host for host in topology.hosts}
    order: list[int] = []
    for cluster in clusters:
        left: list[int] = []
        for name in cluster.hosts:
            ranks = hosts[name].ranks
            whole = len(ranks) // unit * unit
            order += ranks[:whole]
            left += ranks[whole:]
        order += left
    return tuple(order)


def ordered_clusters(topology: Topology, cluster_order: Sequence[str] | None) -> tuple[Cluster, ...]:
    """The clusters in this order; None: by lowest rank. Raises ValueError unless each is named once."""
    if cluster_order is None:
        return topology.clusters
    by_name = {cluster.name: cluster for cluster in topology.clusters}
    if sorted(cluster_order) != sorted(by_name):
        raise ValueError(
            f"cluster_order={list(cluster_order)} must name each cluster once; the topology has {list(by_name)}"
        )
    return tuple(by_name[name] for name in cluster_order)
