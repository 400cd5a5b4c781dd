"""Probe: the ranks exchange their inventories, try which assumed fabrics connect, and measure how fast they are."""

from holmes.probe.discover import discover_topology
from holmes.probe.exchange import Exchange, KeyValueStore
from holmes.probe.inventory import host_identity, local_inventory, usable_ports
from holmes.probe.reach import Responder, ask_token, confirm_fabrics, reaches

__all__ = [
    "Exchange",
    "KeyValueStore",
    "Responder",
    "ask_token",
    "confirm_fabrics",
    "discover_topology",
    "host_identity",
    "local_inventory",
    "reaches",
    "usable_ports",
]
