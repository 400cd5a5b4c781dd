"""The partition with the least bottleneck: exact without interleaving, and with it where the cases can be listed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, combinations, islice

import numpy as np

from holmes.partition.memory_error import memory_error
from holmes.partition.memory_fit import SWEEPS, fitted, limits, overshoot, starts, window_places
from holmes.partition.problem import Ints, Partition, PartitionProblem, costs, partition_at
from holmes.partition.window import Window

LISTED_PARTITIONS = 100_000  # interleaved problems with at most so many partitions are solved by trying all: under 1 s
_BATCH = 20_000
_ROUNDING = 1e-12  # relative: less is no improvement


def best_partition(problem: PartitionProblem) -> Partition:
    """The partition with the least bottleneck time within all memory limits; of several, the one with even stages.

    Exact (`is_optimal`) with chunks=1, in O(stages * layers^2). With chunks > 1, exact where at most LISTED_PARTITIONS
    partitions exist, or where the result meets the lower bound; else a local optimum: dynamic programming over every run
    of the model through all stages, in turns, from an even split and from one by speed.

    Local and deterministic. Raises ValueError, with all numbers and the nearest fix, where memory cannot fit.
    """
    if problem.chunks == 1:
        last = len(problem.layers)
        cuts = Window(problem, [0] * len(problem.stages) + [last], 0).best_time()
        if cuts is None:
            raise memory_error(problem)
        return partition_at(problem, cuts, is_optimal=True)
    if math.comb(len(problem.layers) - 1, problem.virtual_stages - 1) <= LISTED_PARTITIONS:
        cuts = _best_of_all(problem)
        if cuts is None:
            raise memory_error(problem)
        return partition_at(problem, cuts, is_optimal=True)
    found = [_improved(problem, start) for start in starts(problem)]
    fitting = [cuts for cuts in found if overshoot(problem, cuts) <= 0]
    if not fitting:
        raise memory_error(problem)
    best = partition_at(problem, min(fitting, key=lambda cuts: _key(problem, cuts)))
    is_optimal = best.bottleneck_s <= _lower_bound_s(problem) * (1 + _ROUNDING)
    return partition_at(problem, best.cuts, is_optimal=is_optimal)


def _best_of_all(problem: PartitionProblem) -> tuple[int, ...] | None:
    limit = limits(problem)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for cuts in _all_cuts(problem):
        stage_s, link_s, memory = costs(problem, cuts)
        bottleneck = np.maximum(stage_s.max(axis=1), link_s.max(axis=1))
        counts = np.diff(problem.prefix["count"][cuts], axis=1).min(axis=1)
        bottleneck[(memory > limit).any(axis=1) | (counts < problem.least_layers)] = np.inf
        least = bottleneck.min()
        if least == np.inf:
            continue
        squares = np.where(bottleneck <= least, np.square(stage_s).sum(axis=1), np.inf)
        at = int(squares.argmin())
        candidate = (float(least), float(squares[at]), tuple(int(cut) for cut in cuts[at]))
        best = candidate if best is None else min(best, candidate)
    return best and best[2]


def _all_cuts(problem: PartitionProblem) -> Iterator[Ints]:
    """All partitions into non-empty parts, in batches (n, parts + 1)."""
    last, inner = len(problem.layers), problem.virtual_stages - 1
    every = combinations(range(1, last), inner)
    while batch := list(islice(every, _BATCH)):
        flat = np.fromiter(chain.from_iterable(batch), dtype=np.int64, count=len(batch) * inner)
        yield np.pad(flat.reshape(-1, inner), ((0, 0), (1, 1)), constant_values=((0, 0), (0, last)))


def _improved(problem: PartitionProblem, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """A local optimum of time near `cuts`, within the memory limits where these can be met."""
    cuts = fitted(problem, cuts)
    key = _key(problem, cuts)
    for _ in range(SWEEPS):
        before = key
        for first in window_places(problem):
            candidate = Window(problem, cuts, first).best_time()
            if candidate is not None and _is_less(_key(problem, candidate), key):
                cuts, key = candidate, _key(problem, candidate)
        if key == before:
            break
    return cuts


def _key(problem: PartitionProblem, cuts: tuple[int, ...]) -> tuple[float, float]:
    stage_s, link_s, _ = costs(problem, np.array([cuts]))
    return (max(float(stage_s.max()), float(link_s.max())), float(np.square(stage_s).sum()))


def _is_less(new: tuple[float, float], old: tuple[float, float]) -> bool:
    if abs(new[0] - old[0]) > _ROUNDING * old[0]:
        return new[0] < old[0]
    return new[1] < old[1] * (1 - _ROUNDING)


def _lower_bound_s(problem: PartitionProblem) -> float:
    """No partition is faster: all stages equally busy without transfers, or the longest layer on the fastest stage."""
    speeds = [stage.speed for stage in problem.stages]
    longest = max(layer.forward_s + layer.backward_s for layer in problem.layers)
    return max(float(problem.prefix["time"][-1]) / sum(speeds), longest / max(speeds))
