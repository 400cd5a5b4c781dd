"""Where a plan says something else about the machines than a topology does."""

from __future__ import annotations

from collections.abc import Iterator

from holmes.cluster.topology import Host, Topology
from holmes.planning.groups.rank_grid import KINDS
from holmes.planning.groups.reach import Reach
from holmes.planning.plan.plan import Plan

Difference = tuple[str, int, tuple[int, ...], str]  # kind or "plan", groups or hosts, ranks, what is wrong


def plan_differs(plan: Plan, topology: Topology, reach: Reach) -> list[Difference]:
    """All differences: ranks on other hosts, NICs that a host does not have, groups on a network of another class."""
    if plan.world_size != topology.world_size:
        return [("plan", 1, (), f"it is for {plan.world_size} ranks, the topology has {topology.world_size}")]
    hosts = {host.ranks: host for host in topology.hosts}
    moved = [host for host in plan.hosts if host.ranks not in hosts]
    if moved:
        there = topology.host_of(moved[0].ranks[0]).name
        problem = f"ranks of {moved[0].name} are not those of one host of the topology (the first is on {there})"
        return [("plan", len(moved), moved[0].ranks, problem)]
    by_number = [hosts[host.ranks] for host in plan.hosts]
    return [*_nics(plan, by_number), *_networks(plan, reach)]


def _nics(plan: Plan, hosts: list[Host]) -> Iterator[Difference]:
    for network in plan.networks:
        classes = {network.nic_class} | ({"roce_v2", "roce_v1"} if network.nic_class == "ethernet" else set())
        for number, nic in network.nics.items():
            host = hosts[number]
            if not any(port.name == nic and port.nic_class in classes for port in host.ports):
                has = ", ".join(f"{port.name} ({port.nic_class})" for port in host.ports) or "no usable NIC"
                problem = f"host {host.name} has no NIC {nic} of class {network.nic_class}; it has {has}"
                yield ("plan", 1, host.ranks, problem)


def _networks(plan: Plan, reach: Reach) -> Iterator[Difference]:
    for kind in KINDS:
        if plan.grid.size_of(kind) == 1:
            continue
        ranks = plan.groups(kind).ranks
        ours, theirs = plan.reach.shared(ranks), reach.shared(ranks)
        pairs: dict[tuple[int, int], list[int]] = {}
        for row, pair in enumerate(zip(ours.networks.tolist(), theirs.networks.tolist(), strict=True)):
            if not ours.one_host[row]:
                pairs.setdefault(pair, []).append(row)
        for (planned, found), rows in pairs.items():
            plans, finds = plan.reach.rails(planned), reach.rails(found)
            if plans.nic_class != finds.nic_class:
                problem = f"planned on {plans.reason}, but the best network in the topology is {finds.reason}"
                yield (kind, len(rows), tuple(ranks[rows[0]].tolist()), problem)
