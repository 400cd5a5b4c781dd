"""Latency and bandwidth between two RDMA ports, by verbs."""

from __future__ import annotations

import time
from typing import Any

from holmes.cluster.probe.stream import PATIENCE_S, ROUND_TRIPS, Window


def measure(probe: Any, is_asker: bool, window: Window, timeout_s: float) -> tuple[float, float | None]:
    """Both ends of a trial together: the asker writes to the target, then the target to the asker.

    Returns Gbit/s of what this end wrote, and for the asker half of the shortest time from a write to its
    acknowledgement in s. Raises ConnectionError where the other end does not come within `timeout_s`, or is lost.
    """
    _meet(probe, timeout_s)
    latency_s = _latency_s(probe) if is_asker else None
    bytes_per_s = probe.carries(window.warm_s, window.count_s) if is_asker else 0.0
    patience_s = window.warm_s + window.count_s + 2 * PATIENCE_S
    _meet(probe, patience_s)
    if not is_asker:
        bytes_per_s = probe.carries(window.warm_s, window.count_s)
    _meet(probe, patience_s)
    if bytes_per_s <= 0:
        raise ConnectionError("the stream stood still")
    return bytes_per_s * 8e-9, latency_s


def _meet(probe: Any, timeout_s: float) -> None:
    if not probe.meets(timeout_s):
        raise ConnectionError("the other end did not come in time")


def _latency_s(probe: Any) -> float:
    trips_s = []
    for _ in range(ROUND_TRIPS):
        start_s = time.perf_counter()
        if not probe.reaches(PATIENCE_S):
            raise ConnectionError("a write was not acknowledged")
        trips_s.append(time.perf_counter() - start_s)
    return min(trips_s) / 2
