"""Two emulated clusters joined by one uplink each, and moments that are the same on all of their ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def spec_of_clusters(
    name: str, nodes: int, uplink: dict[str, Any], *, rate_gbps: float = 1.0, congestion: str | None = None
) -> Any:
    """The testbed: clusters a and b of so many nodes. `uplink`: rate, delay, loss and queue of each cluster's, as in a
    spec; `rate_gbps`: of a node's NIC; `congestion`: TCP's default on the nodes (None: the kernel's)."""
    from holmes.lab.testbed.spec import parse_spec

    nics = [{"name": "eth0", "network": "eth"}]
    document: dict[str, Any] = {
        "networks": {"eth": {"class": "ethernet", "rate_gbps": rate_gbps, "uplink": uplink}},
        "clusters": {cluster: {"nodes": nodes, "nics": nics} for cluster in "ab"},
    }
    if congestion:
        document["congestion_control"] = congestion
    return parse_spec(name, document)


def begin_together(comm: Any, wait_s: float) -> float:
    """Sleeps until a moment `wait_s` from now, a round trip at least: a barrier lets ranks go half a round trip after
    each other. Returns the moment, of the clock that all emulated nodes share. Collective."""
    moment_s = np.array([time.monotonic()])
    comm.all_reduce(moment_s, "max")
    begin_s = float(moment_s[0]) + wait_s
    time.sleep(max(0.0, begin_s - time.monotonic()))
    return begin_s


def last_after(comm: Any, begin_s: float) -> float:
    """Seconds from that moment until the last rank is here. Collective."""
    end_s = np.array([time.monotonic()])
    comm.all_reduce(end_s, "max")
    return float(end_s[0]) - begin_s
