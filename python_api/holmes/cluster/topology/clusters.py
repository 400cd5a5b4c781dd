"""Clusters follow from the fabrics: hosts that share their best one."""

from __future__ import annotations

from collections.abc import Sequence

from holmes.cluster.topology.fabrics import in_order
from holmes.cluster.topology.parts import Cluster, Fabric, Host, Link, TopologyFinding
from holmes.cluster.topology.topology import Topology


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
) -> Topology:
    """The topology of these hosts and fabrics, its clusters found."""
    return Topology(
        hosts=tuple(hosts),
        fabrics=in_order(hosts, fabrics),
        clusters=find_clusters(hosts, fabrics),
        findings=tuple(findings),
        links=tuple(links),
    )


def _lowest_rank(host: Host) -> int:
    return host.ranks[0]
