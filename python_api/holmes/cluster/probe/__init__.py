"""Probe: the ranks exchange their inventories, try which assumed fabrics connect, and measure how fast they are."""

from holmes.cluster.probe.discover import discover_topology
from holmes.cluster.probe.exchange import Exchange, KeyValueStore
from holmes.cluster.probe.inventory import host_identity, local_inventory, usable_ports
from holmes.cluster.probe.reach import Responder, confirm_fabrics, reaches

__all__ = [
    "Exchange",
    "KeyValueStore",
    "Responder",
    "confirm_fabrics",
    "discover_topology",
    "host_identity",
    "local_inventory",
    "reaches",
    "usable_ports",
]
