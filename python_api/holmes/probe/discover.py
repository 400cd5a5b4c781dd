"""From a running job to its topology, in one collective call."""

from __future__ import annotations

from holmes.probe.exchange import Exchange, KeyValueStore
from holmes.probe.inventory import local_inventory
from holmes.probe.reach import confirm_fabrics
from holmes.topology import NodeInventory, Port, Topology, candidate_fabrics, make_topology, merge_hosts


def discover_topology(store: KeyValueStore, rank: int, size: int, name: str, timeout_s: float = 3.0) -> Topology:
    """Collective over `size` ranks: their inventories, merged, with every fabric confirmed by connections.

    `name` must be new in the store; `timeout_s` bounds one connection attempt. Equal result on all ranks.
    """
    exchange = Exchange(store, rank, size, name)
    mine = local_inventory(rank)
    entries = exchange.all_gather([mine.host, mine.host_id, [vars(port) for port in mine.ports]])
    inventories = [
        NodeInventory(r, host, host_id, tuple(Port(**port) for port in ports))
        for r, (host, host_id, ports) in enumerate(entries)
    ]
    hosts = merge_hosts(inventories)
    return make_topology(hosts, confirm_fabrics(exchange, hosts, candidate_fabrics(hosts), timeout_s))
