"""Probe: the ranks exchange their inventories, try which assumed fabrics connect, and measure how fast they are."""

from holmes.cluster.probe.discover import discover_topology, local_inventory, usable_ports
from holmes.cluster.probe.exchange import Exchange
from holmes.cluster.probe.reach import Responder, ask_token, confirm_fabrics, reaches

__all__ = [
    "Exchange",
    "Responder",
    "ask_token",
    "confirm_fabrics",
    "discover_topology",
    "local_inventory",
    "reaches",
    "usable_ports",
]
