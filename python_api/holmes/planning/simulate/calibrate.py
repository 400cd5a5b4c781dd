"""Calibration: the cost model's free numbers from measurements (`holmes bench --json`) or from a known speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from holmes import files
from holmes.planning.model.gpt import PartTimes, PassTimes
from holmes.planning.simulate.rates import LinkRate, MeasuredTimes
from holmes_comm.errors import UsageError

#: Messages that follow each other in one call of n ranks, and bytes on a rank's link over a call's size: an operation's
#: time is messages * latency + bytes / rate. As the simulator counts them: rings, full duplex.
_COSTS: Mapping[str, Callable[[int], tuple[float, float]]] = {
    "send_recv": lambda n: (1.0, 1.0),
    "ping_pong": lambda n: (2.0, 2.0),
    "reduce_scatter": lambda n: (n - 1.0, (n - 1) / n),
    "all_gather": lambda n: (n - 1.0, (n - 1) / n),
    "all_reduce": lambda n: (2.0 * (n - 1), 2 * (n - 1) / n),
}


_ALL_RANKS_WORK = ("send_recv", "reduce_scatter", "all_gather", "all_reduce")  # processor time is of these only


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkRate:
    """Latency alpha and rate 1 / beta of time = alpha + beta * size, by least squares of the relative error.

    Relative, because times from microseconds to seconds count alike. Both stay at or above 0. Raises ValueError where
    fewer than two different sizes are given, or time does not grow with size.
    """
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2:
        raise UsageError(
            f"a fit needs as many times as sizes, and two different sizes; got {sizes.size} and {times.size}"
        )
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise UsageError(f"times must be finite and above 0; the smallest is {times.min()}")
    columns = np.stack([1 / times, sizes / times], axis=1)
    ones = np.ones(len(times))
    alpha, beta = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if alpha < 0:  # the best with a latency of 0
        alpha, beta = 0.0, np.linalg.lstsq(columns[:, 1:], ones, rcond=None)[0][0]
    if beta <= 0:
        raise UsageError("time does not grow with size, so there is no rate; measure larger sizes")
    return LinkRate(float(8e-9 / beta), float(alpha))


def links_from_bench(path: str | Path, operations: Sequence[str] = tuple(_COSTS)) -> dict[str, LinkRate]:
    """The rate, latency and processor time of each peer in a `holmes bench --json` file.

    A peer is "holmes", or one entry for each NIC selection that was compared. Raises ValueError naming what the file
    lacks.
    """
    data = files.load(path)
    points = _points(data, operations)
    if not points:
        raise UsageError(
            f"{path} has no rows of {', '.join(operations)}: run `holmes bench {' '.join(operations)} --json`"
        )
    costs = _core_s_per_gb(data, operations)
    links = {peer: fit_link([size for size, _ in pairs], [time for _, time in pairs]) for peer, pairs in points.items()}
    return {peer: replace(link, core_s_per_gb=costs.get(peer, 0.0)) for peer, link in links.items()}


def link_from_bench(path: str | Path, peer: str | None = None) -> LinkRate:
    """The rate, latency and processor time of one peer; without a name, of Holmes; where there is only one, of it.

    Raises ValueError naming the peers there are.
    """
    links = links_from_bench(path)
    ours = [name for name in links if name == peer or (peer is None and name.split("[")[0] == "holmes")]
    if peer is None and len(links) == 1:
        ours = list(links)
    if len(ours) != 1:
        wanted = f"no peer {peer!r}" if peer else f"{len(ours)} selections of holmes, so one must be named"
        raise UsageError(f"{path} has {wanted}; its peers are {', '.join(links)}")
    return links[ours[0]]


def solve_increasing(
    function: Callable[[float], float], target: float, low: float, high: float, name: str, tolerance: float = 1e-9
) -> float:
    """The argument at which an increasing function meets the target, by halving the interval (on a logarithmic scale).

    Raises ValueError, with all numbers, where the target is not between the function's values at `low` and `high`.
    """
    at_low, at_high = function(low), function(high)
    if not at_low <= target <= at_high:
        raise UsageError(
            f"no {name} between {low:g} and {high:g} gives {target:g}: the ends give {at_low:g} and {at_high:g}"
        )
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return float((low * high) ** 0.5)


def compute_from_bench(path: str | Path) -> tuple[MeasuredTimes, dict[int, float]]:
    """What a `holmes bench compute --json` file holds: the times of a rank that has a core to itself, and the cores
    that ranks get together when so many of them compute at once. Raises ValueError naming what the file lacks."""
    data = files.load(path)
    try:
        files.check_kind(data, "holmes bench compute", version=1)
        settings, found = data["settings"], {(row["ranks"], row["part"]): row for row in data["rows"]}
        passes = {
            key: PassTimes(row["forward_us"] * 1e-6, row["backward_us"] * 1e-6)
            for key, row in found.items()
            if "forward_us" in row
        }
        alone = min(ranks for ranks, _ in passes)
        layers = {ranks: times.total_s for (ranks, part), times in passes.items() if part == "layer"}
        measured = MeasuredTimes(
            **{name: settings[name] for name in ("hidden", "heads", "sequence", "vocabulary", "micro_batch")},
            times=PartTimes(**{part: passes[alone, part] for part in ("embedding", "layer", "head")}),
            optimizer_ns_per_parameter=found[alone, "optimizer"]["ns_per_parameter"],
            # files of earlier versions do not have it
            sharding_ns_per_parameter=found.get((alone, "sharding"), {}).get("ns_per_parameter", 0.0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no file of `holmes bench compute --json`: {error}") from error
    return measured, {ranks: ranks / alone * layers[alone] / time_s for ranks, time_s in layers.items()}


def _core_s_per_gb(data: Mapping[str, Any], operations: Sequence[str]) -> dict[str, float]:
    """Processor seconds for each 1e9 bytes that a rank sends, by peer: the median over the rows that tell."""
    found: dict[str, list[float]] = {}
    for row in data.get("rows", []):
        name = row.get("operation")
        if name in operations and name in _ALL_RANKS_WORK and row.get("gb_per_core_s"):
            found.setdefault(row["peer"], []).append(1 / row["gb_per_core_s"] / _COSTS[name](int(data["ranks"]))[1])
    return {peer: float(np.median(costs)) for peer, costs in found.items()}


def _points(data: Mapping[str, Any], operations: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(bytes on the link per message, seconds per message) of each peer."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in data.get("rows", []):
        if row.get("operation") in operations and row.get("operation") in _COSTS and row["size_bytes"] > 0:
            messages, share = _COSTS[row["operation"]](int(data["ranks"]))
            pair = (row["size_bytes"] * share / messages, row["time_us"] * 1e-6 / messages)
            points.setdefault(row["peer"], []).append(pair)
    return points
