"""NICs of this host, which of them a group uses, and how a group's ranks agree on them."""

from __future__ import annotations

from holmes_comm._C import Nic, discover_gpus, discover_nics
from holmes_comm.nic_agreement import agree_nics
from holmes_comm.nic_selection import NicSelection

__all__ = ["Nic", "NicSelection", "agree_nics", "discover_gpus", "discover_nics"]
