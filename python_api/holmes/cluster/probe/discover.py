"""From a running job to its topology, in one collective call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.inventory import local_gpu, local_inventory
from holmes.cluster.probe.rates import measure_topology
from holmes.cluster.probe.reach import confirm_fabrics
from holmes.cluster.topology import Host, NodeInventory, Port, Topology, candidate_fabrics, make_topology, merge_hosts
from holmes.cluster.topology.contradictions import MIXED, contradictions, mixed_wires


def discover_topology(
    store: Any, rank: int, size: int, name: str, timeout_s: float = 3.0, measure_s: float = 3.0
) -> Topology:
    """Collective over `size` ranks: their inventories, merged, every fabric confirmed by connections and measured.

    `name` must be new in the store; `timeout_s` bounds one connection attempt, `measure_s` (0: nothing is measured) the
    tournaments of the measurement, which in all takes at most about twice that. Equal result on all ranks.
    """
    exchange = Exchange(store, rank, size, name)
    mine = local_inventory(rank)
    entries = exchange.all_gather([mine.host, mine.host_id, [vars(port) for port in mine.ports]])
    inventories = [
        NodeInventory(r, host, host_id, tuple(Port(**port) for port in ports))
        for r, (host, host_id, ports) in enumerate(entries)
    ]
    hosts = merge_hosts(inventories)
    leads = {host.ranks[0] for host in hosts}
    gpus = exchange.all_gather(local_gpu() if rank in leads else None)
    hosts = tuple(_with_gpu(host, gpus[host.ranks[0]]) for host in hosts)
    assumed = candidate_fabrics(hosts)
    tried = confirm_fabrics(exchange, hosts, [*assumed, *mixed_wires(hosts)], timeout_s)
    fabrics = [fabric for fabric in tried if fabric.nic_class != MIXED]
    wires = [fabric for fabric in tried if fabric.nic_class == MIXED]
    findings = contradictions(hosts, assumed, fabrics, wires)
    if measure_s <= 0:
        return make_topology(hosts, fabrics, findings)
    return measure_topology(exchange, hosts, fabrics, findings, measure_s, timeout_s)


def _with_gpu(host: Host, gpu: Sequence[Any] | None) -> Host:
    return host if gpu is None else dataclasses.replace(host, gpu=gpu[0], gpu_memory_gib=gpu[1])
